"""Conversion of a multiple-choice dataset's columns to options and the letter of the correct one.

Known formats: ARC (lists of texts and of labels, which may be digits), MMLU-Pro (a list, `answer` a letter), MMLU (a
list, `answer` an index from 0), GPQA (the correct option and each incorrect one in its own column).
"""

from collections.abc import Mapping, Sequence

from luffy.config.data import ChoicesField
from luffy.data.choices import LABELS, fixed_order
from luffy.data.columns import as_list, as_text, value_at
from luffy.data.schema import RowError, checked_text


def apart_options(row: Mapping[str, object], field: ChoicesField, question: str) -> tuple[list[str], str]:
    """Return the options of a dataset with a separate column for the correct one, in a fixed order, and its letter."""
    assert field.correct is not None, "refused by the configuration"
    correct = _text(value_at(row, field.correct), field.correct)
    others = [_text(value_at(row, column), column) for column in field.incorrect]
    if correct in others:
        raise RowError(field.correct, "equals one of the incorrect options")
    options = fixed_order(question, [correct, *others])
    return options, LABELS[options.index(correct)]


def listed_options(
    row: Mapping[str, object], field: ChoicesField, answer: str, answer_column: str
) -> tuple[list[str], str]:
    """Return the options in the dataset's order, without fillers, and the letter of the one that `answer` names.

    RowError if there are fewer than two options or more than there are letters, or if `answer` names none of them.
    """
    column, options = _listed(row, field)
    right = _place(answer, answer_column, options, _labels(row, field, len(options)), field)
    kept = [place for place, option in enumerate(options) if option not in field.fillers]
    if not 2 <= len(kept) <= len(LABELS):
        raise RowError(column, f"must hold 2 to {len(LABELS)} options, found {len(kept)}")
    if right not in kept:
        raise RowError(answer_column, "names an option that is a filler")
    return [options[place] for place in kept], LABELS[kept.index(right)]


def option_columns(field: ChoicesField) -> list[str]:
    """Return the columns that hold the options."""
    alone = [column for column in (field.column, field.labels, field.correct) if column is not None]
    return [*alone, *field.columns, *field.incorrect]


def _listed(row: Mapping[str, object], field: ChoicesField) -> tuple[str, list[str]]:
    if field.column is None:
        # There are as many columns as the longest question needs; empty cells are not options.
        values = [(column, value_at(row, column)) for column in field.columns]
        found = [_text(value, column) for column, value in values if value is not None and value != ""]
        return field.columns[0], found
    options = as_list(value_at(row, field.column))
    if options is None:
        raise RowError(field.column, f"must be a list of options, found {type(value_at(row, field.column)).__name__}")
    return field.column, [_text(option, f"{field.column}[{index}]") for index, option in enumerate(options)]


def _labels(row: Mapping[str, object], field: ChoicesField, count: int) -> Sequence[str]:
    if field.labels is None:
        return LABELS[:count]
    labels = as_list(value_at(row, field.labels))
    if labels is None or len(labels) != count:
        raise RowError(field.labels, f"must be a list of {count} labels, one for each option")
    return [str(as_text(label)).strip() for label in labels]


def _place(answer: str, column: str, options: Sequence[str], labels: Sequence[str], field: ChoicesField) -> int:
    """Index of the correct option among those listed."""
    if field.answer_is == "index":
        if not answer.isdecimal() or int(answer) >= len(options):
            raise RowError(column, f"must be an index from 0 to {len(options) - 1}")
        return int(answer)
    named = options if field.answer_is == "text" else labels
    wanted = answer if field.answer_is == "text" else answer.strip(" ().")
    if list(named).count(wanted) != 1:
        raise RowError(column, "names none of the options, or several")
    return list(named).index(wanted)


def _text(value: object, column: str) -> str:
    return checked_text(as_text(value), column).strip()

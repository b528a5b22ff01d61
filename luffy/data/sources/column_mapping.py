r"""Conversion of a dataset's own columns to a `Prompt`.

    prompt = prompt_from_fields(row, fields, author="human")

Known formats: GSM8K (`answer` is a solution that ends in `#### 72`), MATH (`solution` holds the answer in its last
`\boxed{}`), OpenR1 (`generations`, a list, with a parallel list of flags), OlympiadBench (`final_answer`, a list).
Multiple-choice formats: `luffy.data.sources.multiple_choice`.
"""

import re
from collections.abc import Mapping, Sequence

from luffy.config.data import AnswerField, ChoicesField, FieldsConfig, TraceField
from luffy.data.choices import NUM_OPTIONS, OPTIONS, with_options
from luffy.data.columns import as_list, as_text, value_at
from luffy.data.prompt_identity import problem_text, prompt_uid
from luffy.data.schema import RowError, check_json, checked_logprobs, checked_messages, checked_text
from luffy.data.sources.multiple_choice import apart_options, listed_options, option_columns
from luffy.grading.extract import THINK_OPEN, last_box
from luffy.types import Message, Prompt, Trace

_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
_GSM8K_ANSWER = re.compile(r"\n?####\s*(.+?)\s*$")


def prompt_from_fields(row: Mapping[str, object], fields: FieldsConfig, author: str) -> Prompt:
    """Return the row as a `Prompt`; RowError names the faulty column."""
    messages = checked_messages(value_at(row, fields.problem), fields.problem)
    extra = {column: value_at(row, column) for column in fields.extra}
    for column, value in extra.items():
        check_json(value, column)
    if fields.choices is None:
        assert fields.answer is not None, "refused by the configuration"
        ground_truth = _answer(row, fields.answer)
    else:
        options, ground_truth = _options(row, fields.choices, fields.answer, messages)
        messages = with_options(messages, options)
        extra |= {OPTIONS: options, NUM_OPTIONS: len(options)}
    return Prompt(
        uid=prompt_uid(_numbered_source(row, fields), messages),
        data_source=fields.data_source,
        messages=messages,
        ground_truth=ground_truth,
        traces=tuple(trace for field in fields.traces for trace in _traces(row, field, author)),
        ability=fields.ability,
        extra_info=extra,
        grader=fields.row_grader,
    )


def columns_of(fields: FieldsConfig) -> list[str]:
    """Return the columns that a row must have (the first part of dotted names), in order of use."""
    columns = [fields.problem, *([fields.answer.column] if fields.answer else [])]
    columns += option_columns(fields.choices) if fields.choices else []
    columns += [fields.id] if fields.id else []
    columns += fields.extra
    for trace in fields.traces:
        columns += filter(None, (trace.column, trace.author_column, trace.keep_column, trace.logprobs_column))
    return list(dict.fromkeys(column.partition(".")[0] for column in columns))


def _numbered_source(row: Mapping[str, object], fields: FieldsConfig) -> str:
    if fields.id is None:
        return fields.data_source
    return f"{fields.data_source}#{checked_text(as_text(value_at(row, fields.id)), fields.id)}"


def _options(
    row: Mapping[str, object], choices: ChoicesField, answer: AnswerField | None, messages: Sequence[Message]
) -> tuple[list[str], str]:
    if answer is None:
        return apart_options(row, choices, problem_text(messages))
    return listed_options(row, choices, _answer(row, answer), answer.column)


def _answer(row: Mapping[str, object], field: AnswerField) -> str:
    value = value_at(row, field.column)
    if field.element is not None:
        value = _element(value, field)
    text = checked_text(as_text(value), field.column)
    if field.after is not None:
        _, found, text = text.rpartition(field.after)
        if not found:
            raise RowError(field.column, f"holds no {field.after!r}, after which the answer is expected")
    if field.boxed:
        box = last_box(text)
        if box is None:
            raise RowError(field.column, r"must hold the answer in a \boxed{}, found none")
        text = box
    return checked_text(text.strip(), field.column)


def _element(value: object, field: AnswerField) -> object:
    items = as_list(value)
    if field.element == "all":
        if not items:
            raise RowError(field.column, f"must be a list of answers, found {str(value)[:60]!r}")
        return ", ".join(checked_text(as_text(item), field.column).strip() for item in items)
    assert isinstance(field.element, int)
    if items is None or not -len(items) <= field.element < len(items):
        raise RowError(field.column, f"must be a list with an element {field.element}, found {str(value)[:60]!r}")
    return items[field.element]


def _traces(row: Mapping[str, object], field: TraceField, author: str) -> list[Trace]:
    """A missing value or an empty list means no trace; an empty text is an error."""
    value = value_at(row, field.column)
    texts: Sequence[object] = value if isinstance(value, list) else [] if value is None else [value]
    several = isinstance(value, list)
    kept = _parallel(row, field.keep_column, len(texts), several)
    logprobs = _parallel(row, field.logprobs_column, len(texts), several)
    signed = _author(row, field, author)
    found = []
    for index, text in enumerate(texts):
        name = f"{field.column}[{index}]" if several else field.column
        if field.keep_column is not None and not _is_true(kept[index], field.keep_column):
            continue
        written = _rewritten(checked_text(text, name), field)
        found.append(Trace(written, signed, None, checked_logprobs(logprobs[index], str(field.logprobs_column))))
    return found


def _parallel(row: Mapping[str, object], column: str | None, count: int, several: bool) -> Sequence[object]:
    """One value per trace; None for each if there is no such column or value."""
    value = None if column is None else value_at(row, column)
    if value is None:
        return [None] * count
    if not several:
        return [value]
    if not isinstance(value, list) or len(value) != count:
        raise RowError(str(column), f"must be a list of {count}, one per trace, found {str(value)[:60]}")
    return value


def _is_true(value: object, column: str) -> bool:
    """The value of a flag, which may be written as text (CSV); a missing value is false."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if value is None or isinstance(value, bool):
        return value is True
    raise RowError(column, f"must be true or false, found {str(value)[:60]!r}")


def _author(row: Mapping[str, object], field: TraceField, author: str) -> str:
    value = None if field.author_column is None else value_at(row, field.author_column)
    if value is not None:
        return checked_text(value, str(field.author_column))
    return field.author if field.author != "unknown" else author


def _rewritten(text: str, field: TraceField) -> str:
    if field.thinking and not text.lstrip().startswith(THINK_OPEN):
        text = f"{THINK_OPEN}\n{text}"
    if field.rewrite is None:
        return text
    plain = _CALCULATOR_MARK.sub("", text)
    return _GSM8K_ANSWER.sub(lambda found: f"\nThe answer is \\boxed{{{found.group(1)}}}.", plain)

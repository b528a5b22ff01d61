r"""Conversion of a dataset's own columns to a `Prompt`.

    prompt = prompt_from_fields(row, fields, author="human")
    fields = recognised(rows, "numina")         # from the names of the columns and what the first rows hold

Known formats: GSM8K (`answer` is a solution that ends in `#### 72`), MATH (`solution` holds the answer in its last
`\boxed{}`), OpenR1 (`generations`, a list, with a parallel list of flags), OlympiadBench (`final_answer`, a list).
Multiple choice: ARC (lists of texts and of labels, which may be digits), MMLU-Pro (a list, `answer` a letter), MMLU (a
list, `answer` an index from 0), GPQA (the correct option and each incorrect one in its own column).
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from luffy.config.data import AnswerField, ChoicesField, FieldsConfig, TraceField
from luffy.data.schema import (
    RowError,
    as_list,
    as_text,
    check_json,
    checked_logprobs,
    checked_text,
    conversation,
    last_turns,
    problem_text,
    prompt_uid,
    trace_of,
    value_at,
)
from luffy.grading.extract import THINK_OPEN, last_box
from luffy.types import Message, Prompt, Trace


def listed_options(
    row: Mapping[str, object], field: ChoicesField, answer: str, answer_column: str
) -> tuple[list[str], str]:
    """Return the options in the dataset's order, without fillers, and the letter of the one that `answer` names.

    RowError if there are fewer than two options or more than there are letters, or if `answer` names none of them.
    """
    if field.column is None:
        # There are as many columns as the longest question needs; empty cells are not options.
        column, values = field.columns[0], [(name, value_at(row, name)) for name in field.columns]
        options = [_text(value, name) for name, value in values if value is not None and value != ""]
    else:
        column, found = field.column, as_list(value_at(row, field.column))
        if found is None:
            raise RowError(column, f"must be a list of options, found {type(value_at(row, column)).__name__}")
        options = [_text(option, f"{column}[{index}]") for index, option in enumerate(found)]
    labels = list(LABELS[: len(options)])
    if field.labels is not None:
        listed = as_list(value_at(row, field.labels))
        if listed is None or len(listed) != len(options):
            raise RowError(field.labels, f"must be a list of {len(options)} labels, one for each option")
        labels = [str(as_text(label)).strip() for label in listed]
    if field.answer_is == "index":
        if not answer.isdecimal() or int(answer) >= len(options):
            raise RowError(answer_column, f"must be an index from 0 to {len(options) - 1}")
        right = int(answer)
    else:
        named, wanted = (options, answer) if field.answer_is == "text" else (labels, answer.strip(" ()."))
        if named.count(wanted) != 1:
            raise RowError(answer_column, "names none of the options, or several")
        right = named.index(wanted)
    kept = [place for place, option in enumerate(options) if option not in field.fillers]
    if not 2 <= len(kept) <= len(LABELS):
        raise RowError(column, f"must hold 2 to {len(LABELS)} options, found {len(kept)}")
    if right not in kept:
        raise RowError(answer_column, "names an option that is a filler")
    return [options[place] for place in kept], LABELS[kept.index(right)]


def _text(value: object, column: str) -> str:
    return checked_text(as_text(value), column).strip()


_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
_GSM8K_ANSWER = re.compile(r"\n?####\s*(.+?)\s*$")


def prompt_from_fields(row: Mapping[str, object], fields: FieldsConfig, author: str) -> Prompt:
    """Return the row as a `Prompt`; RowError names the faulty column.

    A solution at the end of the problem's messages is no part of the prompt; a `TraceField` reads it.
    """
    messages, _ = conversation(value_at(row, fields.problem), fields.problem, author)
    extra = {column: value_at(row, column) for column in fields.extra}
    for column, value in extra.items():
        check_json(value, column)
    choices = fields.choices
    if choices is None:
        assert fields.answer is not None, "refused by the configuration"
        ground_truth = _answer(row, fields.answer)
    else:
        if fields.answer is not None:
            options, ground_truth = listed_options(row, choices, _answer(row, fields.answer), fields.answer.column)
        else:  # the correct option has a column of its own: all of them in a fixed order
            assert choices.correct is not None, "refused by the configuration"
            correct = _text(value_at(row, choices.correct), choices.correct)
            others = [_text(value_at(row, column), column) for column in choices.incorrect]
            if correct in others:
                raise RowError(choices.correct, "equals one of the incorrect options")
            options = fixed_order(problem_text(messages), [correct, *others])
            ground_truth = LABELS[options.index(correct)]
        messages = with_options(messages, options)
        extra |= {OPTIONS: options, NUM_OPTIONS: len(options)}
    grader = fields.grader or (None if choices is None else "choice")
    number = "" if fields.id is None else f"#{checked_text(as_text(value_at(row, fields.id)), fields.id)}"
    return Prompt(
        uid=prompt_uid(fields.data_source + number, messages),
        data_source=fields.data_source,
        messages=messages,
        ground_truth=ground_truth,
        traces=tuple(trace for field in fields.traces for trace in _traces(row, field, author)),
        ability=fields.ability,
        extra_info=extra,
        grader=None if grader == "rule" else grader,
    )


def columns_of(fields: FieldsConfig) -> list[str]:
    """Return the columns that a row must have (the first part of dotted names), in order of use."""
    columns = [fields.problem, fields.answer.column if fields.answer else None]
    if choices := fields.choices:
        columns += [choices.column, choices.labels, choices.correct, *choices.columns, *choices.incorrect]
    columns += [fields.id, *fields.extra]
    for trace in fields.traces:
        columns += [trace.column, trace.keep_column, trace.logprobs_column]
    return list(dict.fromkeys(column.partition(".")[0] for column in columns if column))


def _answer(row: Mapping[str, object], field: AnswerField) -> str:
    value = value_at(row, field.column)
    if value in (None, "") and field.or_boxed_in is not None and value_at(row, field.or_boxed_in) is not None:
        return _answer(row, AnswerField(column=field.or_boxed_in, boxed=True))
    if (turns := last_turns(value, field.column)) is not None:
        value = turns[-1].content if turns else None
    items = None if field.element is None else as_list(value)
    if field.element == "all":
        if not items:
            raise RowError(field.column, f"must be a list of answers, found {str(value)[:60]!r}")
        value = ", ".join(checked_text(as_text(item), field.column).strip() for item in items)
    elif field.element is not None:
        if items is None or not -len(items) <= field.element < len(items):
            raise RowError(field.column, f"must be a list with an element {field.element}, found {str(value)[:60]!r}")
        value = items[field.element]
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


def _traces(row: Mapping[str, object], field: TraceField, author: str) -> list[Trace]:
    """A missing value or an empty list means no trace; an empty text is an error. Messages hold one, in their
    last turns."""
    value = value_at(row, field.column)
    if (turns := last_turns(value, field.column)) is not None:
        value = turns[-1].content if turns and turns[-1].role == "assistant" else None
    texts: Sequence[object] = value if isinstance(value, list) else [] if value is None else [value]
    several = isinstance(value, list)
    kept = _parallel(row, field.keep_column, len(texts), several)
    logprobs = _parallel(row, field.logprobs_column, len(texts), several)
    signed = field.author if field.author != "unknown" else author
    found = []
    for index, text in enumerate(texts):
        name = f"{field.column}[{index}]" if several else field.column
        if field.keep_column is not None:
            flag = kept[index]
            if isinstance(flag, str):  # as CSV writes it
                flag = {"true": True, "false": False}.get(flag.strip().lower(), flag)
            if flag is not None and not isinstance(flag, bool):
                raise RowError(field.keep_column, f"must be true or false, found {str(flag)[:60]!r}")
            if not flag:
                continue
        written = checked_text(text, name)
        if field.thinking and not written.lstrip().startswith(THINK_OPEN):
            written = f"{THINK_OPEN}\n{written}"
        if field.rewrite is not None:
            plain = _CALCULATOR_MARK.sub("", written)
            written = _GSM8K_ANSWER.sub(lambda mark: f"\nThe answer is \\boxed{{{mark.group(1)}}}.", plain)
        if turns is not None and len(turns) > 1:
            found.append(trace_of(turns, name, signed))
            continue
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


PARTS_OF_A_QUESTION = (
    "instruction", "system", "system_prompt", "context", "passage", "images", "image", "videos", "audio",
)  # fmt: skip
"""Columns beside the problem without which it would be another."""
LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
OPTIONS, NUM_OPTIONS = "options", "num_options"


def with_options(messages: Sequence[Message], options: Sequence[str]) -> tuple[Message, ...]:
    """Return the conversation with the options below its last turn."""
    last = messages[-1]
    return (*messages[:-1], dataclasses.replace(last, content=last.content.rstrip() + _block(options)))


def without_options(prompt: Prompt) -> str:
    """Return the question of a prompt, without its options."""
    text, options = problem_text(prompt.messages), prompt.extra_info.get(OPTIONS)
    if not isinstance(options, list):
        return text
    return text.removesuffix(_block([str(option) for option in options]))


def fixed_order(question: str, options: Sequence[str]) -> list[str]:
    """Return the options ordered by a hash of each with its question, independent of their order in the source."""
    return sorted(options, key=lambda option: hashlib.sha256(f"{len(question)}:{question}{option}".encode()).digest())


def _block(options: Sequence[str]) -> str:
    lines = [f"{label}. {option}" for label, option in zip(LABELS, options, strict=False)]
    return "\n\n" + "\n".join(lines)


_PROBLEMS = ("problem", "question", "prompt", "context_messages", "input", "messages", "conversations")
_ANSWERS = (
    "reward_model.ground_truth", "verification_info.ground_truth", "ground_truth", "answer", "final_answer",
    "expected_answer", "label", "solutions", "solution",
)  # fmt: skip
_DEMONSTRATIONS = ("target", "completion", "generations", "response", "output", "messages", "conversations", "prompt")
_EXTRA = ("source", "subject", "level", "difficulty", "problem_type", "task_type", "problem_id")
"""Names of columns in public data sets; the first that is there is taken."""
_FLAGS = {"generations": "is_reasoning_complete"}
_MARKS = ("\\boxed", "####")
_MAX_ANSWER = 200
"""A longer text is a solution or a question, and no answer."""


def recognised(rows: Sequence[Mapping[str, object]], data_source: str) -> tuple[FieldsConfig | None, str]:
    """Return how the columns of a well-known layout are read, from the first rows of a file, and this as text in YAML.

    None for other layouts, and where the question has other parts (`PARTS_OF_A_QUESTION`); the text then has `COLUMN`
    for each name that is missing. The demonstration is what follows the question in messages, or the `solution` that
    the answer is read from; a solution beside an answer is none, since it need not state that answer.
    """

    def present(column: str) -> list[object]:
        return [value for row in rows if (value := value_at(row, column)) not in (None, "", [])]

    problem = next(filter(present, _PROBLEMS), None)
    beside = [name for name in PARTS_OF_A_QUESTION if name != problem and present(name)]
    written = {name: _solutions(present(name), name) for name in _DEMONSTRATIONS}
    stated = {name: present(name) for name in _ANSWERS} | written
    answer = next(filter(None, (_answer_in(name, values) for name, values in stated.items())), None)
    trace = next((name for name, texts in written.items() if texts and (not answer or name != answer.column)), None)
    # What messages cannot be read for is told row by row.
    trace = trace or next((name for name in _DEMONSTRATIONS if _is_refused(present(name), name)), None)
    if answer is not None and (answer.boxed or answer.after):
        texts = [value for value in stated[answer.column] if isinstance(value, str)]
        is_solution = answer.column in written or any(not text.lstrip(" $").startswith(_MARKS) for text in texts)
        trace = answer.column if is_solution else trace
    elif answer is not None and any("\\boxed" in text for text in written.get(trace or "", ())):
        answer = answer.model_copy(update={"or_boxed_in": trace})
    fields: dict[str, object] = {
        "data_source": data_source,
        "problem": problem or "COLUMN",
        "answer": {"column": "COLUMN"} if answer is None else answer.model_dump(exclude_defaults=True),
    }
    if trace is not None:
        flag = _FLAGS.get(trace)
        kept = {"keep_column": flag} if flag and present(flag) else {}
        rewritten = {"rewrite": "gsm8k"} if answer is not None and answer.after and trace == answer.column else {}
        fields["traces"] = [{"column": trace, **kept, **rewritten}]
    if extra := [name for name in _EXTRA if isinstance(next(iter(present(name)), None), str | int)]:
        fields["extra"] = extra
    if options := next(filter(present, ("options", "choices")), None):
        fields["choices"] = {"column": options}
    is_whole = problem is not None and answer is not None and options is None and not beside
    return FieldsConfig.model_validate_json(json.dumps(fields)) if is_whole else None, json.dumps(fields)


def _solutions(values: Sequence[object], name: str) -> list[str]:
    """The solutions in a column of texts, of lists of texts, or of messages that end in an assistant's."""
    found: list[str] = []
    for value in values:
        try:
            turns = last_turns(value, name)
        except RowError:
            continue
        if turns is not None:
            found += [turn.content for turn in turns[-1:] if turn.role == "assistant"]
        elif name not in _PROBLEMS:
            found += [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    return found


def _is_refused(values: Sequence[object], name: str) -> bool:
    """Whether a column that is no problem's has messages which are refused."""
    try:
        for value in values if name not in _PROBLEMS else ():
            last_turns(value, name)
    except RowError:
        return True
    return False


def _answer_in(column: str, values: Sequence[object]) -> AnswerField | None:
    """How to read the answers in a column by what most of its values look like; None where they hold none."""
    lists = [value for value in values if isinstance(value, list) and value]
    texts = [str(as_text(value[0] if isinstance(value, list) and value else value)) for value in values]

    def most(count: int) -> bool:
        return bool(texts) and 2 * count >= len(texts)

    element: int | Literal["all"] | None = None
    if most(len(lists)):
        element = 0
    if most(sum("####" in text for text in texts)):
        return AnswerField(column=column, element=element, after="####")
    if most(sum("\\boxed" in text for text in texts)):
        return AnswerField(column=column, element=element, boxed=True)
    if element is not None and any(len(value) > 1 for value in lists):
        element = "all"
    return AnswerField(column=column, element=element) if most(sum(len(t) <= _MAX_ANSWER for t in texts)) else None

"""The rows of prepared data, the identity of a problem, and the parsing of one row of a file.

Columns of LUFFY and verl (`data_source, prompt, target, ability, reward_model, extra_info`), plus `uid` and `traces`:
several demonstrations per prompt, each with its author, verdict and log-probabilities, and for those that a model wrote
what is known of the model (`model`, `decoding`, `num_tokens`, and `origin` where data was rewritten). A trace of many
turns has them as messages in `traces.turns`, in place of `text`. `target` repeats the first trace, if it is a single
reply, for readers that expect one demonstration.

`reward_model.style` is `rule` for rows that the experiment's grader grades; a null and verl's longer forms
(`rule-lighteval/MATH_v2`) mean the same. Any other word names the grader of the row (`luffy.config.grading`).
`extra_info` is written as JSON text, since its keys are arbitrary; a struct (as in LUFFY's files) can be read, too.
"""

import ast
import difflib
import hashlib
import io
import itertools
import json
import math
import re
import tokenize
from collections.abc import Collection, Iterable, Mapping, Sequence

import pyarrow as pa

from luffy.errors import LuffyError
from luffy.json_text import parse_json, refuse_deep
from luffy.types import Message, Origin, Prompt, Trace


def value_at(row: Mapping[str, object], column: str) -> object:
    """Return the value of a column, None if there is none; `a.b` reaches into a mapping, also one written as text."""
    value: object = row
    for part in column.split("."):
        value = structured(value) if isinstance(value, str) else value
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def structured(text: str) -> object:
    """Return the value of a text that is JSON, or Python's way to write it (pandas' CSV); None for any other text."""
    for read in (parse_json, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def as_text(value: object) -> object:
    """Return a number as text (`27.0` as "27", 0.1 + 0.2 as "0.3"), None for NaN (a missing cell), else `value`."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, float):
        value = float(f"{value:.15g}")  # the digits that a double holds for certain
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def as_list(value: object) -> list[object] | None:
    """Return a list, which may be written as text (`['2', '3']`); None for anything else.

    NumPy's `['2' '3']`, which pandas writes to CSV, is none: to Python it is one text, `23`.
    """
    if isinstance(value, str):
        try:
            found = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        tokens = tokenize.generate_tokens(io.StringIO(value).readline)
        types = [token.type for token in tokens if token.type != tokenize.NL]
        if (tokenize.STRING, tokenize.STRING) in itertools.pairwise(types):
            return None
        value = found
    return list(value) if isinstance(value, list | tuple) else None


def prompt_uid(data_source: str, messages: Sequence[Message]) -> str:
    """Return 16 hexadecimal digits of the sha256 of the data source and the problem (all but the system prompt)."""
    parts = [data_source]
    for message in _problem(messages):
        parts += (message.role, message.content)
    # Lengths in front keep ("ab", "c") apart from ("a", "bc").
    text = "".join([f"{len(part)}:{part}" for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def problem_key(messages: Sequence[Message]) -> str:
    """Return a key that is equal for equal problems: the turns without the system prompt, case and spacing."""
    return text_key(" ".join(message.content for message in _problem(messages)))


def text_key(text: str) -> str:
    """Return the text without case and spacing."""
    return " ".join(text.split()).casefold()


def problem_text(messages: Sequence[Message]) -> str:
    """Return the question as written: the turns without the system prompt, one per line."""
    return "\n".join(message.content for message in _problem(messages))


def _problem(messages: Sequence[Message]) -> Sequence[Message]:
    """The turns that state the problem: all but system messages, unless there are no others."""
    return [message for message in messages if message.role != "system"] or messages


REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")
"""A file without one of them is refused as a whole."""

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_TRACES = pa.list_(
    pa.struct(
        [
            ("text", pa.string()),
            ("author", pa.string()),
            ("verified", pa.bool_()),
            ("logprobs", pa.list_(pa.float64())),
            ("turns", _MESSAGES),
            ("model", pa.string()),
            ("decoding", pa.string()),
            ("num_tokens", pa.int64()),
            ("origin", pa.string()),
        ]
    )
)
SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("target", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.string()),
        ("traces", _TRACES),
    ]
)
COLUMNS = tuple(SCHEMA.names)
_DEMONSTRATIONS = ("target", "traces")
_MISSPELT = 0.8
"""Similarity (`difflib`) from which a column is taken for another one, misspelt."""
_RULE = "rule"
_VERLS_RULE = re.compile(r"rule(?![a-z0-9_]).*", re.DOTALL)
"""`rule` and verl's forms of it; `ruler` and `rule_2` are names of graders."""
_ABILITY = "math"
_WRITTEN_MESSAGES = re.compile(r"""\s*(?:array\()?\[\s*\{\s*['"](?:role|content|from|value)['"]\s*:""")
"""The start of a list of messages that is written as text."""
_SHAREGPT = {"human": "user", "gpt": "assistant"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""What servers and datasets call an assistant's thoughts beside its content."""
_CALLS = ("tool_calls", "function_call", "images", "audio")
_LEARNED = ("weight", "loss_mask", "train")
_RENDERED = re.compile(
    r"\s*(?:<s>|<bos>|<\|begin_of_text\|>|<｜begin▁of▁sentence｜>)?\s*"
    r"(<\|im_start\|>|<\|start_header_id\|>|<\|user\|>|\[INST\]|<｜User｜>|<start_of_turn>)"
)
"""How texts begin that a chat template has written."""
_SHOWN = re.compile(r"<(?:image|video|audio)>|<\|(?:image|video|audio)_pad\|>")
_GRADER_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ROLES = ("system", "user", "assistant", "tool")
_to_json = json.JSONEncoder(sort_keys=True).encode


class RowError(LuffyError):
    """A row that cannot be used: the field, and what is wrong with it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def prompt_from_row(row: Mapping[str, object], author: str = "unknown", *, is_asked: bool = True) -> Prompt:
    """Return the row as a `Prompt`; RowError names the first field that is wrong.

    `author` is the author of traces that name none. A missing `uid` is computed. `prompt` and `target` may also be
    plain text: a user's message, an assistant's reply. Lists and mappings may be written as text (CSV). An assistant's
    turns at the end of `prompt` are a trace: no prompt holds its solution. One that is not to be asked again
    (`is_asked`) may be written under a chat template already.
    """
    for name, meant in _misspelt_demonstrations(row).items():
        raise RowError(name, f"is no column; did you mean {meant!r}?")
    # LUFFY's own training file has an empty data source.
    data_source = checked_text(row.get("data_source"), "data_source", may_be_empty=True)
    messages, solution = conversation(row.get("prompt"), "prompt", author, is_asked=is_asked)
    uid = as_text(row.get("uid"))
    model = row.get("reward_model")
    model = (structured(model) or model) if isinstance(model, str) else model
    if not isinstance(model, dict):
        raise RowError("reward_model", "is missing" if model is None else f"must be a mapping, found {_short(model)}")
    uid = prompt_uid(data_source, messages) if uid is None else checked_text(uid, "uid")
    ground_truth = checked_text(as_text(model.get("ground_truth")), "reward_model.ground_truth")
    traces = _traces(row, author)
    traces += tuple(trace for trace in solution if trace.text not in {each.text for each in traces})
    ability = checked_text(_ABILITY if row.get("ability") is None else row["ability"], "ability")
    extra = given = row.get("extra_info")
    if isinstance(given, str):
        try:
            extra = parse_json(given) if given.strip() else None
        except ValueError as error:
            if not isinstance(extra := structured(given), dict):
                raise RowError("extra_info", f"is not JSON: {error}") from None
            check_json(extra, "extra_info")
    if extra is not None and not isinstance(extra, dict):
        raise RowError("extra_info", f"must be a mapping (or its JSON text), found {_short(extra)}")
    if extra is not None and extra is given:
        check_json(given, "extra_info")
    style = model.get("style")
    is_rule = style is None or (isinstance(style, str) and _VERLS_RULE.fullmatch(style))
    # `model` is verl's word for a reward model, which is no grader.
    if not is_rule and (not isinstance(style, str) or style == "model" or not _GRADER_NAME.fullmatch(style)):
        allowed = "'rule' (the experiment's grader) or a grader's name"
        raise RowError("reward_model.style", f"must be {allowed}, found {_short(style)}")
    return Prompt(uid, data_source, messages, ground_truth, traces, ability, extra or {}, None if is_rule else style)


def present_columns(wanted: Collection[str], found: Iterable[str]) -> list[str]:
    """The columns of `found` that are wanted, and those that may be misspelt columns of demonstrations.

    The latter are read so that `prompt_from_row` can refuse them.
    """
    found = list(found)
    misspelt = _misspelt_demonstrations(found) if {*_DEMONSTRATIONS} <= {*wanted} else {}
    return [name for name in found if name in wanted or name in misspelt]


def _misspelt_demonstrations(columns: Iterable[str]) -> dict[str, str]:
    """Each suspicious column with the one that it seems to mean; empty where there are demonstrations.

    A row may have none, so a misspelt `target` would otherwise go unnoticed.
    """
    names = {*columns}
    if not names.isdisjoint(_DEMONSTRATIONS):
        return {}
    found = {}
    for name in sorted(names - {*COLUMNS}):
        if close := difflib.get_close_matches(name, _DEMONSTRATIONS, n=1, cutoff=_MISSPELT):
            found[name] = close[0]
    return found


def record_batch(prompts: Sequence[Prompt]) -> pa.RecordBatch:
    """Return the prompts as one batch of `SCHEMA`, by columns; structs are tuples in the order of their fields."""

    def written(messages: Sequence[Message]) -> list[tuple[str, str]]:
        return [(message.role, message.content) for message in messages]

    columns = (
        [prompt.uid for prompt in prompts],
        [prompt.data_source for prompt in prompts],
        [written(prompt.messages) for prompt in prompts],
        # A trace of many turns is no single reply.
        [[("assistant", trace.text) for trace in prompt.traces[:1] if not trace.turns] for prompt in prompts],
        [prompt.ability for prompt in prompts],
        [(prompt.grader or _RULE, prompt.ground_truth) for prompt in prompts],
        [_to_json(prompt.extra_info) for prompt in prompts],
        [
            [
                (each.text, each.author, each.verified, each.logprobs, written(each.turns), each.model, each.decoding,
                 each.num_tokens, each.origin)
                for each in prompt.traces
            ]
            for prompt in prompts
        ],
    )  # fmt: skip
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def conversation(
    value: object, field: str, author: str, *, is_asked: bool = True
) -> tuple[tuple[Message, ...], tuple[Trace, ...]]:
    """Return the messages of a prompt's column (a user's text is one), and the solution at their end as a trace.

    The solution is what follows the last message of a user, where that ends with an assistant's. Raises RowError.
    """
    messages = _messages(value, field, role_of_text="user")
    if not messages:
        raise RowError(field, "is empty; give at least one message")
    for message in messages if is_asked else ():
        if message.role != "assistant" and (mark := _RENDERED.match(message.content)):
            raise RowError(field, f"is already written by a chat template ({mark[1]}); give its messages")
        if (mark := _SHOWN.search(message.content)) is not None:
            raise RowError(field, f"shows what is no text ({mark[0]})")
    if messages[-1].role != "assistant":
        return messages, ()
    last = messages[-1].content
    if last.rfind("<think>") > last.rfind("</think>"):
        raise RowError(field, "ends in a turn that an assistant has only begun (<think>); remove the turn")
    solution = _after_question(messages)
    if len(solution) == len(messages):
        raise RowError(field, "holds an assistant's message, and no user's")
    return messages[: -len(solution)], (trace_of(solution, field, author),)


def _after_question(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return messages[max((place for place, each in enumerate(messages, start=1) if each.role == "user"), default=0) :]


def trace_of(turns: tuple[Message, ...], field: str, author: str) -> Trace:
    """Return the turns of a solution as a trace; RowError where they are not an assistant's with answers between."""
    roles = [turn.role for turn in turns]
    if not roles or roles[0] != "assistant" or roles[-1] != "assistant":
        raise RowError(field, f"must begin and end with an assistant's message, found {roles}")
    if "system" in roles or ("assistant", "assistant") in itertools.pairwise(roles):
        raise RowError(field, f"must have a tool's or a user's message between two of an assistant, found {roles}")
    return Trace(joined_text(turns), author, turns=turns if len(turns) > 1 else ())


def last_turns(value: object, field: str) -> tuple[Message, ...] | None:
    """Return the messages after the last one of a user in a list of messages, or its text; None for other values."""
    is_list = isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    if not is_list and not (isinstance(value, str) and _WRITTEN_MESSAGES.match(value)):
        return None
    return _after_question(_messages(value, field, role_of_text="assistant"))


def checked_text(value: object, field: str, *, may_be_empty: bool = False) -> str:
    """Return `value` where it is text that can be written as UTF-8, else RowError."""
    if not isinstance(value, str):
        raise RowError(field, "is missing" if value is None else f"must be text, found {_short(value)}")
    if not value.strip() and not may_be_empty:
        raise RowError(field, "is empty")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RowError(field, "holds half of a UTF-16 pair, which is no character") from None
    return value


def _messages(value: object, field: str, role_of_text: str) -> tuple[Message, ...]:
    if isinstance(value, str) and _WRITTEN_MESSAGES.match(value):
        value = structured(value)
        if value is None:
            raise RowError(field, "is a list of messages written as text, but not as JSON (NumPy's has no commas)")
    if isinstance(value, str):
        return (Message(role_of_text, checked_text(value, field)),)
    if not isinstance(value, list):
        reason = "is missing" if value is None else f"must be a list of messages, found {_short(value)}"
        raise RowError(field, reason)
    messages = []
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise RowError(f"{field}[{index}]", f"must be a mapping with role and content, found {_short(item)}")
        role, text = item.get("role"), item.get("content")
        if role is None and "from" in item:  # the form of ShareGPT
            role, text = _SHAREGPT.get(str(item["from"]), item["from"]), item.get("value")
        if role not in _ROLES:
            raise RowError(f"{field}[{index}].role", f"must be one of {', '.join(_ROLES)}, found {_short(role)}")
        content = checked_text(text, f"{field}[{index}].content", may_be_empty=role == "system")
        reasoning = [found for name in _REASONING if (found := item.get(name))]
        if reasoning and role == "assistant":
            content = f"<think>\n{checked_text(reasoning[0], f'{field}[{index}]').strip()}\n</think>\n{content}"
        _refuse_unread(item, f"{field}[{index}]")
        messages.append(Message(role, content))
    return tuple(messages)


def _refuse_unread(message: Mapping[str, object], where: str) -> None:
    """Raise RowError for what a message says besides its text that would change what is asked or learned."""
    for name in _CALLS:
        if message.get(name):
            raise RowError(f"{where}.{name}", "is not read; write calls into content as the chat template writes them")
    for name in _LEARNED:
        if message.get(name) is not None and not message[name]:
            raise RowError(f"{where}.{name}", "says that the turn is not learned, and each of a trace is; remove it")


def _traces(row: Mapping[str, object], author: str) -> tuple[Trace, ...]:
    """The row's `traces`; where there are none, its `target`."""
    value = row.get("traces")
    value = structured(value) if isinstance(value, str) else value
    if value is not None and not isinstance(value, list):
        raise RowError("traces", f"must be a list, found {_short(value)}")
    if value:
        return tuple([_trace(item, f"traces[{index}]", author) for index, item in enumerate(value)])
    if row.get("target") is None:
        return ()
    messages = _messages(row["target"], "target", role_of_text="assistant")
    if len(messages) > 1 or any(message.role != "assistant" for message in messages):
        raise RowError("target", f"must hold one assistant message, found {[message.role for message in messages]}")
    return tuple(Trace(message.content, author) for message in messages)


def _trace(value: object, field: str, author: str) -> Trace:
    if not isinstance(value, dict):
        raise RowError(field, f"must be a mapping with text, found {_short(value)}")
    verified, num_tokens, origin = value.get("verified"), value.get("num_tokens"), value.get("origin")
    if verified is not None and not isinstance(verified, bool):
        raise RowError(f"{field}.verified", f"must be true, false or null, found {_short(verified)}")
    if num_tokens is not None and (not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 0):
        raise RowError(f"{field}.num_tokens", f"must be a whole number of at least 0, found {_short(num_tokens)}")
    if origin is not None and origin not in list(Origin):
        raise RowError(f"{field}.origin", f"must be one of {', '.join(Origin)}, found {_short(origin)}")
    turns: tuple[Message, ...] = ()
    if value.get("turns") not in (None, []):
        where = f"{field}.turns"
        turns = _messages(value["turns"], where, role_of_text="assistant")
        trace_of(turns, where, author)
    return Trace(
        text=joined_text(turns) if turns else checked_text(value.get("text"), f"{field}.text"),
        author=_optional_text(value.get("author"), f"{field}.author") or author,
        verified=verified,
        logprobs=checked_logprobs(value.get("logprobs"), f"{field}.logprobs"),
        turns=turns,
        model=_optional_text(value.get("model"), f"{field}.model"),
        decoding=_optional_text(value.get("decoding"), f"{field}.decoding"),
        num_tokens=num_tokens,
        origin=None if origin is None else Origin(origin),
    )


def _optional_text(value: object, field: str) -> str | None:
    return None if value is None else checked_text(value, field)


def joined_text(turns: Sequence[Message]) -> str:
    """Return the text of a trace of many turns."""
    return "\n".join(turn.content for turn in turns)


def checked_logprobs(value: object, field: str) -> tuple[float, ...] | None:
    """Return log-probabilities where `value` is None or a list of finite numbers up to 0, else RowError."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise RowError(field, f"must be a list of numbers, found {_short(value)}")
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number) or number > 0:
            raise RowError(field, f"must hold finite numbers of at most 0, found {_short(number)}")
    return tuple(float(number) for number in value)


def check_json(value: object, field: str) -> None:
    """Raise RowError where `value` cannot be written as JSON (a date, bytes), or nests too deep to be read again."""
    try:
        refuse_deep(_to_json(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(field, f"cannot be written as JSON: {error}") from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

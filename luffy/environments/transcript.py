"""Episodes as text for people: the turns of the policy and of the environment told apart."""

import itertools
import re
from collections.abc import Callable, Sequence

from luffy.errors import DataError
from luffy.grading.extract import final_reply
from luffy.types import Message, Source

_HEADING = re.compile(r"^--- (policy|environment|demonstration) ---\n", re.MULTILINE)
_HEADINGS = {Source.ENVIRONMENT: "environment", Source.OFF_POLICY: "demonstration"}
_POLICY = "assistant"


def transcript(
    token_ids: Sequence[int],
    source: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    prompt_ids: Sequence[int] = (),
    context_starts: Sequence[int] = (),
) -> str:
    """The response, each turn under a heading that says who wrote it; a single turn has none.

    A context that the chat template rendered again (`Trajectory.context_starts`) is shown from where it differs from
    the one before it.
    """
    tokens = list(zip(token_ids, source, strict=True))
    shown = _without_repetition(tokens, prompt_ids, context_starts) if context_starts else tokens
    runs = itertools.groupby(shown, key=lambda token: token[1])
    return headed([(Source(who), decode([token_id for token_id, _ in run])) for who, run in runs])


def _without_repetition(
    tokens: Sequence[tuple[int, int]], prompt_ids: Sequence[int], context_starts: Sequence[int]
) -> list[tuple[int, int]]:
    shown = list(tokens[: context_starts[0]])
    seen = [*prompt_ids, *(token_id for token_id, _ in shown)]
    for start, end in itertools.pairwise((*context_starts, len(tokens))):
        part = tokens[start:end]
        pairs = zip(seen, part, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1][0] and pair[1][1] == Source.ENVIRONMENT, pairs)
        shown += part[len(list(same)) :]
        seen = [token_id for token_id, _ in part]
    return shown


def headed(turns: Sequence[tuple[Source, str]]) -> str:
    """The text of the turns, each under a heading that says who wrote it; without headings where nothing answered."""
    if not any(who is Source.ENVIRONMENT for who, _ in turns):
        return "".join(text for _, text in turns)
    parts = [f"--- {_HEADINGS.get(who, 'policy')} ---\n" + text.strip("\n") for who, text in turns]
    return "\n".join(parts)


def turns_of(text: str) -> list[tuple[str, str]]:
    """Parse a transcript into (who, text) for each turn; a single turn without a heading has "" for who.

    For display only: a model may write a heading, too.
    """
    start, *parts = _HEADING.split(text)
    turns = list(zip(parts[::2], parts[1::2], strict=True))
    return turns if turns and not start.strip() else [("", text)]


def after_thinking(turn: str) -> str:
    """Return the text after the last `</think>`; all of it without reasoning, "" where the reasoning is unclosed."""
    return final_reply(turn) or ""


def xml_fields(text: str, fields: Sequence[str | tuple[str, ...]]) -> dict[str, str | None]:
    """Return what stands in the first element of each name, without outer white space; None where there is none.

    A tuple in `fields` lists alternatives, such as `("code", "answer")`: each of them is a key of the result.
    """
    found: dict[str, str | None] = {}
    for name in (name for field in fields for name in ((field,) if isinstance(field, str) else field)):
        _, opened, rest = text.partition(f"<{name}>")
        content, closed, _ = rest.partition(f"</{name}>")
        found[name] = content.strip() if opened and closed else None
    return found


def trace_turns(completion: Sequence[Message], data_source: str) -> tuple[Message, ...]:
    """The turns of a trace of many turns; empty for an episode of a single turn, which is a plain trace.

    `completion` is everything after the prompt, and ends with a turn of the policy. Raises DataError where the
    environment spoke before the policy: a trace begins with its author's turn.
    """
    if completion and completion[0].role != _POLICY:
        raise DataError(
            f"{data_source}: the environment adds messages to the prompt (`reset`), which a trace cannot hold, so its "
            "episodes cannot become demonstrations; put these messages into the data's prompts, or remove the stage"
        )
    return tuple(completion) if len(completion) > 1 else ()

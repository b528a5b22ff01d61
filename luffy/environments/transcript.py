"""Episodes as text for people: the turns of the policy and of the environment told apart."""

import itertools
import re
from collections.abc import Callable, Sequence

from luffy.types import Source

_HEADING = re.compile(r"^--- (policy|environment|demonstration) ---\n", re.MULTILINE)
_HEADINGS = {Source.ENVIRONMENT: "environment", Source.OFF_POLICY: "demonstration"}


def transcript(token_ids: Sequence[int], source: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
    """The response, each turn under a heading that says who wrote it; a single turn has none."""
    runs = itertools.groupby(zip(token_ids, source, strict=True), key=lambda token: token[1])
    return headed([(Source(who), decode([token_id for token_id, _ in run])) for who, run in runs])


def headed(turns: Sequence[tuple[Source, str]]) -> str:
    """The text of the turns, each under a heading that says who wrote it; without headings where nothing answered."""
    if not any(who is Source.ENVIRONMENT for who, _ in turns):
        return "".join(text for _, text in turns)
    parts = [f"--- {_HEADINGS.get(who, 'policy')} ---\n" + text.strip("\n") for who, text in turns]
    return "\n".join(parts)


def turns_of(text: str) -> list[tuple[str, str]]:
    """What `transcript` wrote as (who, text) for each turn; a single turn is nobody's in particular ("").

    For display alone: a model may write a heading, too.
    """
    start, *parts = _HEADING.split(text)
    turns = list(zip(parts[::2], parts[1::2], strict=True))
    return turns if turns and not start.strip() else [("", text)]

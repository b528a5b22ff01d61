"""Turns a finished episode into a trace.

turns = trace_turns(episode.completion, problem.data_source)
"""

from collections.abc import Sequence

from luffy.errors import DataError
from luffy.types import Message

_POLICY = "assistant"


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

"""Prompts on which all rollouts failed, collected for an SFT step: ReLIFT (arXiv 2506.07527)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from luffy.types import Group


class FailedPrompts:
    """A queue of prompts, without duplicates, whose rollouts were all wrong.

    `newest` puts the prompts of a step at the front, as in the authors' code (older ones may then never be taken);
    `oldest` puts them at the end. A prompt that is solved while queued stays, as in the authors' code, and one that was
    taken may be added again.
    """

    def __init__(self, take: Literal["newest", "oldest"]) -> None:
        self._newest_first = take == "newest"
        # A dictionary as an ordered set.
        self._waiting: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def observe(self, groups: Sequence[Group], has_trace: Callable[[str], bool]) -> None:
        """Add the prompts of a step (all its groups, before filtering) that no rollout solved and that have a trace;
        groups without rollouts are ignored."""
        failed = dict.fromkeys(
            group.uid for group in groups if group.rollouts and group.accuracy == 0.0 and has_trace(group.uid)
        )
        self._waiting = failed | self._waiting if self._newest_first else self._waiting | failed

    def take(self, count: int) -> list[str] | None:
        """Remove and return the next `count` prompts; None while there are fewer."""
        if len(self._waiting) < count:
            return None
        taken = list(self._waiting)[:count]
        for uid in taken:
            del self._waiting[uid]
        return taken

    def state(self) -> dict[str, object]:
        """The queue as plain JSON values."""
        return {"waiting": list(self._waiting)}

    def restore(self, state: Mapping[str, object]) -> None:
        """Replace the queue with that of a checkpoint."""
        waiting = state["waiting"]
        assert isinstance(waiting, Sequence)
        self._waiting = dict.fromkeys(waiting)

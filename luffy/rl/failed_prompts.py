"""Prompts that every rollout failed, gathered for an SFT step: ReLIFT (arXiv 2506.07527)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from luffy.types import Group


class FailedPrompts:
    """Prompts whose rollouts were all wrong, each once, in the order in which SFT steps take them.

    `newest` puts the prompts of a step before those that wait, as the authors' code does (where older ones may wait for
    ever); `oldest` puts them after. A prompt that is solved while it waits stays, as in the authors' code; one that was
    taken may come back.
    """

    def __init__(self, take: Literal["newest", "oldest"]) -> None:
        self._newest_first = take == "newest"
        # A dictionary keeps the order and finds a member at once.
        self._waiting: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def observe(self, groups: Sequence[Group], has_trace: Callable[[str], bool]) -> None:
        """Add the prompts of a step (all of its groups, before any filter) that no rollout solved and that have a
        trace to learn from; groups without rollouts are left out."""
        failed = dict.fromkeys(
            group.uid for group in groups if group.rollouts and group.accuracy == 0.0 and has_trace(group.uid)
        )
        self._waiting = failed | self._waiting if self._newest_first else self._waiting | failed

    def take(self, count: int) -> list[str] | None:
        """The next `count` prompts, which leave the queue; None while there are fewer."""
        if len(self._waiting) < count:
            return None
        taken = list(self._waiting)[:count]
        for uid in taken:
            del self._waiting[uid]
        return taken

    def state(self) -> dict[str, object]:
        """The queue, in types that JSON gives back exactly."""
        return {"waiting": list(self._waiting)}

    def restore(self, state: Mapping[str, object]) -> None:
        """Take the state of a checkpoint in place of the present one."""
        waiting = state["waiting"]
        assert isinstance(waiting, Sequence)
        self._waiting = dict.fromkeys(waiting)

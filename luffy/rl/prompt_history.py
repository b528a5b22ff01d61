"""History of each prompt over the steps: its running pass rate, and the step that drew it last."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from luffy.types import Group


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The history of one prompt."""

    pass_rate: float | None = None
    """None until its rollouts were graded."""
    last_step: int = 0
    """The step that drew it last; 0: none has."""


NEVER_DRAWN = PromptRecord()


class PromptHistory:
    """Running pass rates and draws of all prompts, limited to what each step may know when it is planned.

    With `ahead` (`rl.max_staleness`) k, step s is planned after training on step s - 1 - k, so it sees pass rates only
    up to that step. A resumed run may know later ones, but ignores them and so draws the same prompts. The draws of the
    steps in between are known from their plans. A pure function of the observed groups and of the plans.
    """

    def __init__(self, memory: float, ahead: int) -> None:
        self._memory = memory
        self._ahead = ahead
        self._settled: dict[str, PromptRecord] = {}
        """Records up to the last observed step minus `ahead`."""
        self._recent: dict[int, list[tuple[str, float | None, bool]]] = {}
        """For each later step and each of its groups: uid, accuracy of the rollouts, and whether it was drawn."""
        self._planned: dict[int, tuple[str, ...]] = {}
        """Prompts drawn by planned steps that are not observed yet."""

    def plan(self, step: int, uids: Sequence[str]) -> None:
        """Record the prompts that `step` has drawn."""
        self._planned[step] = tuple(uids)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record all groups of a step, before filtering; replayed ones count for the pass rate only."""
        self._planned.pop(step, None)
        self._recent[step] = [
            (group.uid, group.accuracy if group.rollouts else None, not group.is_replayed) for group in groups
        ]
        for earlier in [s for s in self._recent if s <= step - self._ahead]:
            self._enter(self._settled, earlier, self._recent.pop(earlier))

    def as_known_to(self, step: int) -> Mapping[str, PromptRecord]:
        """The records visible to the plan of `step`; prompts without one have never been drawn."""
        known = dict(self._settled)
        for earlier, observed in sorted(self._recent.items()):
            if earlier <= step - 1 - self._ahead:
                self._enter(known, earlier, observed)
            elif earlier < step:
                _mark(known, earlier, [uid for uid, _, is_drawn in observed if is_drawn])
        for earlier, uids in sorted(self._planned.items()):
            if earlier < step:
                _mark(known, earlier, uids)
        return known

    def state(self) -> dict[str, object]:
        """The records as plain JSON values."""
        return {
            "settled": {uid: list(astuple(record)) for uid, record in self._settled.items()},
            "recent": {str(step): [list(each) for each in observed] for step, observed in self._recent.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the records with those of a checkpoint."""
        self._settled = {uid: PromptRecord(*record) for uid, record in state["settled"].items()}
        self._recent = {
            int(step): [(uid, rate, drawn) for uid, rate, drawn in seen] for step, seen in state["recent"].items()
        }
        self._planned = {}

    def _enter(
        self, known: dict[str, PromptRecord], step: int, observed: Sequence[tuple[str, float | None, bool]]
    ) -> None:
        for uid, accuracy, is_drawn in observed:
            before = known.get(uid, NEVER_DRAWN)
            rate = before.pass_rate
            if accuracy is not None:
                rate = accuracy if rate is None else self._memory * rate + (1 - self._memory) * accuracy
            known[uid] = PromptRecord(rate, step if is_drawn else before.last_step)


def _mark(known: dict[str, PromptRecord], step: int, uids: Sequence[str]) -> None:
    for uid in uids:
        known[uid] = PromptRecord(known.get(uid, NEVER_DRAWN).pass_rate, step)

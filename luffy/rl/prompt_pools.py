"""Draws prompts by quota from pools of similar running pass rate: `rl.sampling: {kind: pools}`."""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from luffy.config.draws import PoolSampling
from luffy.objectives.schedules import value_at
from luffy.rl.drawn_prompts import drawn_shares, fresh_uids
from luffy.rl.prompt_history import NEVER_DRAWN, PromptHistory, PromptRecord
from luffy.rl.quotas import available_quotas, step_offset
from luffy.rl.rows import RolloutTask
from luffy.seeds import derive_seed
from luffy.types import Group

POOLS = ("new", "hard", "normal", "easy")


class PoolSampler:
    """Draws a quota of prompts from each pool, least recently drawn first (`PoolSampling`)."""

    def __init__(
        self, tasks: Sequence[RolloutTask], config: PoolSampling, seed: int, total_steps: int, ahead: int
    ) -> None:
        self._tasks = tasks
        self._config = config
        self._seed = seed
        self._total_steps = total_steps
        self._ahead = ahead
        self._history = PromptHistory(config.memory, ahead)

    def draw(self, step: int, count: int, drawn: Sequence[str] = ()) -> list[RolloutTask]:
        """`count` prompts by the quotas of the pools; one that this step, or a step still in flight, has already drawn
        is taken only where no other is left."""
        known = self._history.as_known_to(step)
        on_their_way = {uid for uid, record in known.items() if record.last_step >= step - self._ahead}
        chosen: list[RolloutTask] = []
        while len(chosen) < count:
            taken = {*drawn, *(task.uid for task in chosen)}
            left = self._without(taken | on_their_way) or self._without(taken) or self._tasks
            chosen += self._from_pools(left, known, step, count - len(chosen), len(drawn) + len(chosen))
        return chosen

    def plan(self, step: int, uids: Sequence[str]) -> None:
        """Record the prompts that the step has drawn."""
        self._history.plan(step, uids)

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Record the pass rates of a step."""
        self._history.observe(step, groups)

    def metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Share of each pool among the drawn prompts, and number of prompts in the pool."""
        known, pool_of = self._history.as_known_to(step), self._pools(step)
        drawn = Counter(pool_of(known.get(uid, NEVER_DRAWN)) for uid in fresh_uids(groups))
        all_prompts = Counter(pool_of(known.get(task.uid, NEVER_DRAWN)) for task in self._tasks)
        sizes = {f"batch/pool_{name}_size": float(all_prompts[name]) for name in POOLS}
        return drawn_shares("pool", POOLS, drawn) | sizes

    def state(self) -> dict[str, object]:
        """The history of every prompt."""
        return self._history.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore it from a checkpoint."""
        self._history.restore(state)

    def _without(self, uids: set[str]) -> list[RolloutTask]:
        return [task for task in self._tasks if task.uid not in uids]

    def _from_pools(
        self, tasks: Sequence[RolloutTask], known: Mapping[str, PromptRecord], step: int, count: int, num_drawn: int
    ) -> list[RolloutTask]:
        pools: dict[str, list[RolloutTask]] = {name: [] for name in POOLS}
        pool_of = self._pools(step)
        for task in tasks:
            pools[pool_of(known.get(task.uid, NEVER_DRAWN))].append(task)
        sizes = {name: len(pool) for name, pool in pools.items()}
        offset = step_offset(self._seed, "pools", step, num_drawn)
        parts = available_quotas(self._config.shares.model_dump(), sizes, count, offset)

        def age(task: RolloutTask) -> tuple[int, int]:
            return known.get(task.uid, NEVER_DRAWN).last_step, derive_seed(self._seed, "pool", step, task.uid)

        return [task for name, part in parts.items() for task in heapq.nsmallest(part, pools[name], key=age)]

    def _pools(self, step: int) -> Callable[[PromptRecord], str]:
        """The pool of a prompt at `step`."""
        hard, easy = (
            value_at(bound, step, self._total_steps) for bound in (self._config.hard_at_most, self._config.easy_above)
        )

        def pool_of(record: PromptRecord) -> str:
            if record.last_step == 0:
                return "new"
            if record.pass_rate is None:  # drawn and not observed yet, or observed without a rollout of the bare prompt
                return "normal"
            return "hard" if record.pass_rate <= hard else "easy" if record.pass_rate > easy else "normal"

        return pool_of

"""Scheduling of generation: right before a step, or up to `max_staleness` steps ahead of the trainer."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from luffy.cluster.protocol import Cluster
from luffy.rl.experience import Experience, StepPlan
from luffy.rl.rows import BusyTime
from luffy.types import SAMPLED, Group


class Generation:
    """Generates the groups of each step, possibly ahead of the trainer.

    With `max_staleness` k, rollouts of step s start once the weights after step s - 1 - k are published. This admission
    rule bounds staleness, so no rollouts have to be discarded. With k = 0, generation and training alternate.
    A context manager: running generation is abandoned when the context ends.
    """

    def __init__(self, experience: Experience, cluster: Cluster, max_staleness: int, last_step: int) -> None:
        self._experience = experience
        self._cluster = cluster
        self._ahead = max_staleness
        self._last_step = last_step
        self._running: dict[int, tuple[StepPlan, Future[list[Group]]]] = {}
        self._threads = ThreadPoolExecutor(max(max_staleness, 1), thread_name_prefix="generation")
        self._busy = BusyTime()
        self._counting = threading.Lock()
        self._num_tokens = 0
        self._weights_s = 0.0

    def take(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The groups of `step`, now in the journal, and metrics of the wait for them (`perf/`).

        Called when the trainer has finished all earlier steps.
        """
        began = time.perf_counter()
        self._admit(step)
        plan, future = self._running.pop(step)
        depth = future.done() + sum(other.done() for _, other in self._running.values())
        groups = future.result()
        self._experience.commit(plan, groups)
        waited = time.perf_counter() - began
        queue = {"perf/queue_depth": float(depth)} if self._ahead else {}
        metrics = {"perf/trainer_idle_s": waited, "perf/weights_s": self._weights_s} | queue | self._speed()
        return groups, metrics | self._cluster.metrics()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _admit(self, step: int) -> None:
        waiting = [s for s in range(step, min(step + self._ahead, self._last_step) + 1) if s not in self._running]
        plans = [self._experience.plan(s) for s in waiting]
        began = time.perf_counter()
        if any(plan.journalled is None for plan in plans):
            self._cluster.publish(step - 1)
        self._weights_s = time.perf_counter() - began
        for plan in plans:
            self._running[plan.step] = (plan, self._start(plan))

    def _start(self, plan: StepPlan) -> Future[list[Group]]:
        if self._ahead:
            return self._threads.submit(self._generate, plan)
        # No overlap: run in this thread, which has the trainer's torch settings.
        future: Future[list[Group]] = Future()
        future.set_result(self._generate(plan))
        return future

    def _generate(self, plan: StepPlan) -> list[Group]:
        if plan.journalled is not None:
            return list(plan.journalled)
        with self._busy.measured():
            groups = self._experience.generate(plan, self._cluster.engine)
        with self._counting:
            self._num_tokens += _num_sampled(groups)
        return groups

    def _speed(self) -> dict[str, float]:
        """Since the last call: seconds of generation (grading included), of grading alone, the share of time without
        generation, and tokens per second of the finished responses."""
        elapsed, busy = self._busy.since_last()
        with self._counting:
            num_tokens, self._num_tokens = self._num_tokens, 0
        times = {"perf/generation_s": busy, "perf/grading_s": self._experience.grading_s()}
        idle = {"perf/engine_idle_share": 1 - busy / elapsed if elapsed > 0 else 0.0}
        return times | idle | ({"perf/rollout_tokens_per_s": num_tokens / busy} if num_tokens and busy else {})


def _num_sampled(groups: Sequence[Group]) -> int:
    rows = (row for group in groups for row in (*group.trajectories, *group.replaced, *group.failed))
    return sum(source in SAMPLED for row in rows for source in row.source)

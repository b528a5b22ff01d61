"""Builds graded groups from prompts: rollouts, off-policy rows (traces or their prefixes), replayed rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from luffy.config.objective import GroupConfig
from luffy.grading import Grader, GradeRequest
from luffy.rl.busy_time import BusyTime
from luffy.rl.prefixes import PrefixedRow, prefix_length
from luffy.rl.rows import Row, replayed_row
from luffy.rl.tasks import Demonstration, RolloutTask
from luffy.rollout.engine import RolloutEngine, SamplingParams
from luffy.seeds import derive_seed
from luffy.types import Group, Trajectory


class GroupCollector:
    """Generates and grades the groups of a step. A group has rollouts, then off-policy rows, then the replayed row.

    Off-policy rows are whole traces or, with `group.prefix`, prefixes of traces that the policy continues. A whole
    trace is used once per group, so a prompt with too few traces gets more rollouts instead; prefixes may all come
    from one trace. All rows except replayed ones are graded; a prefix and its continuation are graded as one text.
    """

    def __init__(
        self,
        grader: Grader,
        decode: Callable[[Sequence[int]], str],
        params: SamplingParams,
        group: GroupConfig,
        seed: int,
        total_steps: int,
    ) -> None:
        self._grader = grader
        self._decode = decode
        self._params = params
        self._group = group
        self._seed = seed
        self._total_steps = total_steps
        self._grading = BusyTime()

    def collect(
        self, engine: RolloutEngine, tasks: Sequence[RolloutTask], step: int, earlier: Sequence[str] = ()
    ) -> list[Group]:
        """One group per task, in order.

        `step` counts from 1. `earlier` holds the prompt uids of the step's earlier rounds: a prompt that repeats within
        a step is sampled with new seeds.
        """
        visits = _visits(tasks, earlier)
        plans = [self._plan(task, visit, step) for task, visit in zip(tasks, visits, strict=True)]
        rows = self._graded(tasks, self._generated(engine, plans))
        groups = [Group(task.uid, (*found, *_replayed(task))) for task, found in zip(tasks, rows, strict=True)]
        return self._with_traces_where_failing(tasks, groups, step)

    def grading_s(self) -> float:
        """Seconds since the last call in which responses were graded."""
        return self._grading.since_last()[1]

    def _plan(self, task: RolloutTask, visit: int, step: int) -> list[Row]:
        """The rows of a group before generation: rollouts, then off-policy rows."""
        traces = self._traces(task, step) if self._group.off_policy_when_accuracy_at_most is None else []
        num_rollouts = self._group.size - len(traces) - len(_replayed(task))
        seeds = [
            derive_seed(self._seed, "rollout", step, task.uid, visit * self._group.size + sample)
            for sample in range(num_rollouts + len(traces))
        ]
        return [Row(task.prompt_ids, seed) for seed in seeds[:num_rollouts]] + [
            Row(task.prompt_ids, seed, trace, self._num_given(task, trace, index, len(traces), visit, step))
            for index, (seed, trace) in enumerate(zip(seeds[num_rollouts:], traces, strict=True))
        ]

    def _traces(self, task: RolloutTask, step: int) -> list[Demonstration]:
        """The trace of each off-policy row; a task with more traces than rows rotates them over the steps."""
        available, prefix = task.demonstrations, self._group.prefix
        if not available:
            return []
        start = derive_seed(self._seed, "demonstration", step, task.uid) % len(available)
        count = self._group.off_policy if prefix else min(self._group.off_policy, len(available))
        stride = 0 if prefix and prefix.shared else 1
        return [available[(start + i * stride) % len(available)] for i in range(count)]

    def _num_given(self, task: RolloutTask, trace: Demonstration, index: int, count: int, visit: int, step: int) -> int:
        if self._group.prefix is None:
            return len(trace.token_ids)
        row = PrefixedRow(task.uid, index, count, visit)
        return prefix_length(self._group.prefix, len(trace.token_ids), row, step, self._total_steps, self._seed)

    def _generated(self, engine: RolloutEngine, plans: Sequence[Sequence[Row]]) -> list[list[Row]]:
        """The planned rows with what the policy sampled, from a single call of the engine."""
        requests = [row.request() for plan in plans for row in plan if not row.is_whole_trace]
        completions = iter(engine.generate(requests, self._params))
        return [
            [row if row.is_whole_trace else replace(row, sampled=next(completions)) for row in plan] for plan in plans
        ]

    def _graded(self, tasks: Sequence[RolloutTask], rows: Sequence[Sequence[Row]]) -> list[list[Trajectory]]:
        wanted = [
            GradeRequest(row.text(self._decode), task.ground_truth, task.problem)
            for task, found in zip(tasks, rows, strict=True)
            for row in found
        ]
        with self._grading.measured():
            grades = iter(self._grader.grade(wanted))
        return [[row.trajectory(next(grades)) for row in found] for found in rows]

    def _with_traces_where_failing(
        self, tasks: Sequence[RolloutTask], groups: Sequence[Group], step: int
    ) -> list[Group]:
        """The groups, with wrong rollouts replaced by traces where accuracy is at most the configured bound."""
        bound = self._group.off_policy_when_accuracy_at_most
        if bound is None:
            return list(groups)
        chosen = [
            self._traces(task, step) if group.accuracy <= bound else []
            for task, group in zip(tasks, groups, strict=True)
        ]
        traces = self._graded(
            tasks,
            [[_whole(task, trace) for trace in found] for task, found in zip(tasks, chosen, strict=True)],
        )
        return [_in_place_of_wrong(*pair) for pair in zip(groups, traces, strict=True)]


def _visits(tasks: Sequence[RolloutTask], earlier: Sequence[str]) -> list[int]:
    """Number of earlier occurrences of each task's prompt in the step."""
    seen = Counter(earlier)
    visits = []
    for task in tasks:
        visits.append(seen[task.uid])
        seen[task.uid] += 1
    return visits


def _replayed(task: RolloutTask) -> tuple[Trajectory, ...]:
    return () if task.replayed is None else (replayed_row(task.replayed),)


def _whole(task: RolloutTask, trace: Demonstration) -> Row:
    return Row(task.prompt_ids, trace=trace, num_given=len(trace.token_ids))


def _in_place_of_wrong(group: Group, traces: Sequence[Trajectory]) -> Group:
    """The group with its last wrong rollouts replaced by traces; surplus traces are left out."""
    wrong = [row for row in group.rollouts if not row.is_correct]
    count = min(len(traces), len(wrong))
    leaving = wrong[len(wrong) - count :]
    staying = tuple(row for row in group.trajectories if not any(row is other for other in leaving))
    return Group(group.uid, (*staying, *traces[:count]), replaced=tuple(leaving))

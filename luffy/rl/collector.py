"""From prompts to graded groups: rollouts from the engine, rows that traces guide, replayed rows."""

from collections import Counter
from collections.abc import Callable, Sequence

from luffy.config.objective import GroupConfig
from luffy.grading import GradeRequest, GraderPool
from luffy.rl.prefixes import GuidedRow, prefix_length
from luffy.rl.rows import GeneratedRow, PlannedRow, replayed_row
from luffy.rl.tasks import Demonstration, RolloutTask
from luffy.rollout.engine import RolloutEngine, SamplingParams
from luffy.seeds import derive_seed
from luffy.types import Group, Trajectory


class GroupCollector:
    """Rolls out and grades the groups of a step. The rows of a group: rollouts, guided rows, the replayed row.

    Guided rows are whole traces or, with `group.prefix`, prefixes of traces that the policy continues. A whole trace is
    used once, so a prompt with fewer traces than the group wants is topped up with rollouts; one trace may give the
    prefixes of many rows. All but replayed rows are graded, traces too; a hybrid row is graded as one text.
    """

    def __init__(
        self,
        grader: GraderPool,
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

    def collect(
        self, engine: RolloutEngine, tasks: Sequence[RolloutTask], step: int, earlier: Sequence[str] = ()
    ) -> list[Group]:
        """One group for each task, in the order of the tasks.

        `step` counts from 1. `earlier` names the prompts (uids) of the step's earlier rounds: a prompt that comes again
        in a step is sampled with new seeds.
        """
        visits = _visits(tasks, earlier)
        plans = [self._plan(task, visit, step) for task, visit in zip(tasks, visits, strict=True)]
        rows = self._graded(tasks, self._generated(engine, plans))
        groups = [Group(task.uid, (*found, *_replayed(task))) for task, found in zip(tasks, rows, strict=True)]
        return self._with_traces_where_failing(tasks, groups, step)

    def _plan(self, task: RolloutTask, visit: int, step: int) -> list[PlannedRow]:
        """The rows of a group before generation: rollouts, then guided rows."""
        guides = self._guides(task, step) if self._group.off_policy_when_accuracy_at_most is None else []
        num_rollouts = self._group.size - len(guides) - len(_replayed(task))
        seeds = [
            derive_seed(self._seed, "rollout", step, task.uid, visit * self._group.size + sample)
            for sample in range(num_rollouts + len(guides))
        ]
        return [PlannedRow(task.prompt_ids, seed) for seed in seeds[:num_rollouts]] + [
            PlannedRow(task.prompt_ids, seed, guide, self._num_given(task, guide, index, len(guides), visit, step))
            for index, (seed, guide) in enumerate(zip(seeds[num_rollouts:], guides, strict=True))
        ]

    def _guides(self, task: RolloutTask, step: int) -> list[Demonstration]:
        """The trace of each guided row; a task with more traces than that takes turns over the steps."""
        available, prefix = task.demonstrations, self._group.prefix
        if not available:
            return []
        start = derive_seed(self._seed, "demonstration", step, task.uid) % len(available)
        count = self._group.off_policy if prefix else min(self._group.off_policy, len(available))
        stride = 0 if prefix and prefix.shared else 1
        return [available[(start + i * stride) % len(available)] for i in range(count)]

    def _num_given(self, task: RolloutTask, guide: Demonstration, index: int, count: int, visit: int, step: int) -> int:
        if self._group.prefix is None:
            return len(guide.token_ids)
        row = GuidedRow(task.uid, index, count, visit)
        return prefix_length(self._group.prefix, len(guide.token_ids), row, step, self._total_steps, self._seed)

    def _generated(self, engine: RolloutEngine, plans: Sequence[Sequence[PlannedRow]]) -> list[list[GeneratedRow]]:
        """Every planned row with its completion; one call of the engine for all groups."""
        requests = [row.request() for plan in plans for row in plan if not row.is_complete]
        completions = iter(engine.generate(requests, self._params))
        return [[GeneratedRow(row, None if row.is_complete else next(completions)) for row in plan] for plan in plans]

    def _graded(self, tasks: Sequence[RolloutTask], rows: Sequence[Sequence[GeneratedRow]]) -> list[list[Trajectory]]:
        wanted = [
            GradeRequest(row.text(self._decode), task.ground_truth, task.problem)
            for task, found in zip(tasks, rows, strict=True)
            for row in found
        ]
        grades = iter(self._grader.grade(wanted))
        return [[row.trajectory(next(grades)) for row in found] for found in rows]

    def _with_traces_where_failing(
        self, tasks: Sequence[RolloutTask], groups: Sequence[Group], step: int
    ) -> list[Group]:
        """The groups, with traces in place of wrong rollouts where too few rollouts are right."""
        bound = self._group.off_policy_when_accuracy_at_most
        if bound is None:
            return list(groups)
        guides = [
            self._guides(task, step) if group.accuracy <= bound else []
            for task, group in zip(tasks, groups, strict=True)
        ]
        traces = self._graded(
            tasks,
            [[_whole(task, guide) for guide in found] for task, found in zip(tasks, guides, strict=True)],
        )
        return [_in_place_of_wrong(*pair) for pair in zip(groups, traces, strict=True)]


def _visits(tasks: Sequence[RolloutTask], earlier: Sequence[str]) -> list[int]:
    """How often each task's prompt came earlier in the step."""
    seen = Counter(earlier)
    visits = []
    for task in tasks:
        visits.append(seen[task.uid])
        seen[task.uid] += 1
    return visits


def _replayed(task: RolloutTask) -> tuple[Trajectory, ...]:
    return () if task.replayed is None else (replayed_row(task.replayed),)


def _whole(task: RolloutTask, guide: Demonstration) -> GeneratedRow:
    return GeneratedRow(PlannedRow(task.prompt_ids, guide=guide, num_given=len(guide.token_ids)), completion=None)


def _in_place_of_wrong(group: Group, traces: Sequence[Trajectory]) -> Group:
    """The group with traces in place of its last wrong rollouts; right ones stay, so traces may be left out."""
    wrong = [row for row in group.rollouts if not row.is_correct]
    count = min(len(traces), len(wrong))
    leaving = wrong[len(wrong) - count :]
    staying = tuple(row for row in group.trajectories if not any(row is other for other in leaving))
    return Group(group.uid, (*staying, *traces[:count]), displaced=tuple(leaving))

"""Builds graded groups from prompts: rollouts, off-policy rows (traces or their prefixes), replayed rows."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from luffy.config.objective import GroupConfig
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.failed_share import refuse_failures
from luffy.grading import Grader
from luffy.rl.fallbacks import AnchorFallback, Fallback, HintFallback, TraceFallback
from luffy.rl.rows import Demonstration, RolloutTask, Row, RowSampler, Visit, replayed_row
from luffy.rl.trace_starts import Anchors, HintedPrompts, PrefixedRow, prefix_length
from luffy.rollout.engine import RolloutEngine, SamplingParams
from luffy.rollout.stop_texts import StopTexts
from luffy.seeds import derive_seed
from luffy.types import FinishReason, Group, Source, Trajectory


class GroupCollector:
    """Plans the rows of each group, has them sampled and graded, and applies the fallback where rollouts fail.

    A group has rollouts, then off-policy rows, then the replayed row, which is not graded again. Off-policy rows are
    whole traces or, with `group.prefix`, prefixes of traces that the policy continues. A whole trace is used once per
    group, so a prompt with too few traces gets more rollouts instead; prefixes may all come from one trace. Rows whose
    environment failed are kept apart (`Group.failed`), so a group may have fewer rows than planned.

    For `decode`, `player` and `stops` see `RowSampler`; `hints` come with `group.hint`, `anchors` with `group.anchor`.
    """

    def __init__(
        self,
        grader: Grader,
        decode: Callable[[Sequence[int]], str],
        params: SamplingParams,
        group: GroupConfig,
        seed: int,
        total_steps: int,
        player: EpisodePlayer | None = None,
        stops: StopTexts | None = None,
        hints: HintedPrompts | None = None,
        anchors: Anchors | None = None,
    ) -> None:
        assert (hints is None) == (group.hint is None), "hints come with their section"
        assert (anchors is None) == (group.anchor is None), "anchors come with their section"
        self._sampler = RowSampler(grader, decode, params, player, stops)
        self._limits = None if player is None else player.limits
        self._group = group
        self._seed = seed
        self._total_steps = total_steps
        self._stops = stops
        self._fallback = self._open_fallback(hints, anchors)

    def collect(
        self, engine: RolloutEngine, tasks: Sequence[RolloutTask], step: int, earlier: Sequence[str] = ()
    ) -> list[Group]:
        """One group per task, in order.

        `step` counts from 1. `earlier` holds the prompt uids of the step's earlier rounds: a prompt that repeats within
        a step is sampled with new seeds. Raises EnvironmentFault when the environment failed in more than
        `max_failed_share` of all episodes played here.
        """
        visits, sample = _visits(tasks, step, earlier), _SoundRows(self._sampler, engine, tasks)
        rows = sample([self._plan(visit) for visit in visits])
        groups = [Group(task.uid, (*found, *_replayed(task))) for task, found in zip(tasks, rows, strict=True)]
        if self._fallback is not None:
            groups = self._fallback.apply(visits, groups, sample)
        if self._limits is not None:
            refuse_failures(sample.episodes, self._limits)
        return [replace(group, failed=tuple(failed)) for group, failed in zip(groups, sample.failed, strict=True)]

    def grading_s(self) -> float:
        """Seconds spent on grading since the last call."""
        return self._sampler.grading_s()

    def _open_fallback(self, hints: HintedPrompts | None, anchors: Anchors | None) -> Fallback | None:
        group = self._group
        if group.off_policy_when_accuracy_at_most is not None:
            return TraceFallback(group.off_policy_when_accuracy_at_most, self._traces)
        if hints is not None:
            return HintFallback(hints, self._seed)
        if anchors is not None:
            return AnchorFallback(anchors, group.size, self._seed, self._stops)
        return None

    def _plan(self, visit: Visit) -> list[Row]:
        """The rows of a group before generation: rollouts, then off-policy rows."""
        task = visit.task
        traces = self._traces(task, visit.step) if self._group.off_policy_when_accuracy_at_most is None else []
        num_rollouts = self._group.size - len(traces) - len(_replayed(task))
        seeds = [
            derive_seed(self._seed, "rollout", visit.step, task.uid, visit.repeat * self._group.size + sample)
            for sample in range(num_rollouts + len(traces))
        ]
        return [Row(task.prompt_ids, seed) for seed in seeds[:num_rollouts]] + [
            Row(task.prompt_ids, seed, trace, self._num_given(trace, visit, index, len(traces)))
            for index, (seed, trace) in enumerate(zip(seeds[num_rollouts:], traces, strict=True))
        ]

    def _traces(self, task: RolloutTask, step: int) -> list[Demonstration]:
        """The trace of each off-policy row: consecutive ones from a random start, which differs from step to step."""
        available, prefix = task.demonstrations, self._group.prefix
        if not available:
            return []
        start = derive_seed(self._seed, "demonstration", step, task.uid) % len(available)
        count = self._group.off_policy if prefix else min(self._group.off_policy, len(available))
        stride = 0 if prefix and prefix.shared else 1
        return [available[(start + i * stride) % len(available)] for i in range(count)]

    def _num_given(self, trace: Demonstration, visit: Visit, index: int, count: int) -> int:
        """Tokens of the trace that off-policy row `index` of `count` begins with."""
        if self._group.prefix is None:
            return len(trace.token_ids)
        row = PrefixedRow(visit.task.uid, index, count, visit.repeat)
        wanted = prefix_length(self._group.prefix, len(trace.token_ids), row, visit.step, self._total_steps, self._seed)
        if self._stops is not None:  # no stop text in the prefix, so that the policy has something left to write
            wanted = self._stops.before_first(trace.token_ids[:wanted])
        while wanted and trace.source and trace.source[wanted - 1] is Source.ENVIRONMENT:
            wanted -= 1  # the prefix ends with a turn of the assistant, which the live environment answers itself
        return wanted


@dataclass(slots=True)
class _SoundRows:
    """Samples and grades the rows planned for each task, and keeps those apart whose environment failed."""

    sampler: RowSampler
    engine: RolloutEngine
    tasks: Sequence[RolloutTask]
    failed: list[list[Trajectory]] = field(init=False)
    """For each task, of all calls."""
    episodes: list[FinishReason] = field(default_factory=list)
    """The end of every row that was played, of all calls."""

    def __post_init__(self) -> None:
        self.failed = [[] for _ in self.tasks]

    def __call__(self, plans: Sequence[Sequence[Row]]) -> list[list[Trajectory]]:
        rows = self.sampler.sample(self.engine, self.tasks, plans)
        for failed, plan, found in zip(self.failed, plans, rows, strict=True):
            failed += [row for row in found if row.has_failed]
            pairs = zip(plan, found, strict=True)
            self.episodes += [row.finish_reason for planned, row in pairs if self.sampler.is_played(planned)]
        return [[row for row in found if not row.has_failed] for found in rows]


def _visits(tasks: Sequence[RolloutTask], step: int, earlier: Sequence[str]) -> list[Visit]:
    seen = Counter(earlier)
    visits = []
    for task in tasks:
        visits.append(Visit(task, step, seen[task.uid]))
        seen[task.uid] += 1
    return visits


def _replayed(task: RolloutTask) -> tuple[Trajectory, ...]:
    return () if task.replayed is None else (replayed_row(task.replayed),)

"""Builds graded groups from prompts, and chooses those that a step trains on.

A group has rollouts, off-policy rows (traces or their prefixes) and replayed rows. Where its rollouts fail, a fallback
adds whole traces, rollouts under another prompt or branches off a trace; a configuration has at most one of them
(`GroupConfig`).

A zero-variance group is one whose rewards are all equal, over rollouts, off-policy and replayed rows together: with the
joint population, it has no policy gradient. The same rule applies under `advantage.population: on_policy`, and keeps a
group of wrong rollouts with a correct trace, which contributes through the supervised term.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from luffy.config.group import (
    AdvantageConfig,
    DynamicSampling,
    GroupAdvantage,
    GroupConfig,
    GroupFilter,
    SuccessLadder,
)
from luffy.config.training import OverlongConfig
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.limits import refuse_failures
from luffy.environments.transcript import transcript
from luffy.grading.request import Grader
from luffy.rl.retries import RetryPrompts
from luffy.rl.rows import Demonstration, HintedPrompt, RolloutTask, Row, RowSampler, Visit, replayed_row
from luffy.rl.trace_starts import Anchors, AnchorSearch, HintedPrompts, prefix_length, with_hinted_rows
from luffy.rollout.engine import RolloutEngine, SamplingParams, StopTexts
from luffy.seeds import derive_seed
from luffy.tracking.tracker import SampleRollout
from luffy.training.batching import row_advantages
from luffy.types import FinishReason, Group, Source, Trajectory

_Sample = Callable[[Sequence[Sequence[Row]]], list[list[Trajectory]]]
"""Samples and grades the rows planned for each task; returns those whose environment did not fail."""


@dataclass(slots=True)
class GroupCollector:
    """Plans the rows of each group, has them sampled and graded, and applies the fallback where rollouts fail.

    A group has rollouts, then off-policy rows, then the replayed row, which is not graded again. Off-policy rows are
    whole traces or, with `group.prefix`, prefixes of traces that the policy continues. A whole trace is used once per
    group, so a prompt with too few traces gets more rollouts instead; prefixes may all come from one trace. Rows whose
    environment failed are kept apart (`Group.failed`), so a group may have fewer rows than planned. With `step_tokens`
    a group may stay open (`Group.is_open`).

    For `decode`, `player` and `stops` see `RowSampler`; `hints`, `retries` and `anchors` come with their sections of
    `group`.
    """

    grader: Grader
    decode: Callable[[Sequence[int]], str]
    params: SamplingParams
    group: GroupConfig
    seed: int
    total_steps: int
    player: EpisodePlayer | None = None
    stops: StopTexts | None = None
    hints: HintedPrompts | None = None
    retries: RetryPrompts | None = None
    anchors: Anchors | None = None
    overlong: OverlongConfig | None = None
    step_tokens: int | None = None
    sampler: RowSampler = field(init=False)

    def __post_init__(self) -> None:
        assert (self.hints is None) == (self.group.hint is None), "hints come with their section"
        assert (self.retries is None) == (self.group.retry is None), "retries come with their section"
        assert (self.anchors is None) == (self.group.anchor is None), "anchors come with their section"
        self.sampler = RowSampler(
            self.grader, self.decode, self.params, self.player, self.stops, self.overlong, self.step_tokens
        )

    def collect(
        self, engine: RolloutEngine, tasks: Sequence[RolloutTask], step: int, earlier: Sequence[str] = ()
    ) -> list[Group]:
        """One group per task, in order.

        `step` counts from 1. `earlier` holds the prompt uids of the step's earlier rounds: a prompt that repeats within
        a step is sampled with new seeds. Raises EnvironmentFault when the environment failed in more than
        `max_failed_share` of all episodes played here.
        """
        seen, visits = Counter(earlier), list[Visit]()
        for task in tasks:
            visits.append(Visit(task, step, seen[task.uid]))
            seen[task.uid] += 1
        failed: list[list[Trajectory]] = [[] for _ in tasks]
        episodes: list[FinishReason] = []  # the end of every row that was played

        def sample(plans: Sequence[Sequence[Row]]) -> list[list[Trajectory]]:
            rows = self.sampler.sample(engine, tasks, plans)
            for apart, plan, found in zip(failed, plans, rows, strict=True):
                apart += [row for row in found if row.has_failed]
                pairs = zip(plan, found, strict=True)
                episodes.extend(row.finish_reason for planned, row in pairs if self.sampler.is_played(planned))
            return [[row for row in found if not row.has_failed] for found in rows]

        rows = self._sampled(visits, sample)
        groups = [
            Group(task.uid, (*found, *_replayed(task))) if task.begun is None else _continued(task.begun, found)
            for task, found in zip(tasks, rows, strict=True)
        ]
        if self.group.off_policy_when_accuracy_at_most is not None:
            groups = self._with_traces(visits, groups, sample, self.group.off_policy_when_accuracy_at_most)
        elif self.hints is not None or self.retries is not None:
            groups = self._with_hints(visits, groups, sample)
        elif self.anchors is not None:
            groups = self._anchored(visits, groups, sample, self.anchors)
        if self.player is not None:
            refuse_failures(episodes, self.player.limits)
        return [replace(group, failed=tuple(apart)) for group, apart in zip(groups, failed, strict=True)]

    def grading_s(self) -> float:
        """Seconds spent on grading since the last call."""
        return self.sampler.grading_s()

    def _sampled(self, visits: Sequence[Visit], sample: _Sample) -> list[list[Trajectory]]:
        """The rows of each group, all at once or, with `prefix.length.kind: by_success`, rung after rung."""
        plans = [self._plan(visit) for visit in visits]
        ladder = None if self.group.prefix is None else self.group.prefix.length
        if not isinstance(ladder, SuccessLadder):
            return sample(plans)
        start = self.group.size - ladder.num_rows
        found = sample([plan[:start] for plan in plans])
        for rung in ladder.rungs:
            guides = [bool(rows) and sum(row.is_correct for row in rows) / len(rows) < rung.below for rows in found]
            parts = [
                [row if is_guided else replace(row, num_given=0) for row in plan[start : start + rung.rows]]
                for plan, is_guided in zip(plans, guides, strict=True)
            ]
            found = [[*rows, *more] for rows, more in zip(found, sample(parts), strict=True)]
            start += rung.rows
        return found

    def _plan(self, visit: Visit) -> list[Row]:
        """The rows of a group before generation: rollouts, then off-policy rows; of an open group the interrupted
        ones."""
        task = visit.task
        if task.begun is not None:
            rows = [row for row in task.begun.trajectories if row.finish_reason is FinishReason.INTERRUPTED]
            return [
                Row(row.prompt_ids, derive_seed(self.seed, "continued", visit.step, task.uid, place), begun=row)
                for place, row in enumerate(rows, start=visit.repeat * self.group.size)
            ]
        traces = self._traces(task, visit.step) if self.group.off_policy_when_accuracy_at_most is None else []
        num_rollouts = self.group.size - len(traces) - len(_replayed(task))
        seeds = [
            derive_seed(self.seed, "rollout", visit.step, task.uid, visit.repeat * self.group.size + sample)
            for sample in range(num_rollouts + len(traces))
        ]
        hinted = [] if self.hints is None else self.hints.of_group(visit, num_rollouts)
        prompts = itertools.chain(hinted, itertools.repeat(None))
        rollouts = zip(seeds[:num_rollouts], prompts, strict=False)
        return [Row(task.prompt_ids, seed, hinted=prompt) for seed, prompt in rollouts] + [
            Row(task.prompt_ids, seed, trace, self._num_given(trace, visit, index, len(traces)))
            for index, (seed, trace) in enumerate(zip(seeds[num_rollouts:], traces, strict=True))
        ]

    def _traces(self, task: RolloutTask, step: int) -> list[Demonstration]:
        """The trace of each off-policy row: consecutive ones from a random start, which differs from step to step. All
        of them where the trainer is to choose."""
        available, prefix = task.demonstrations, self.group.prefix
        if not available:
            return []
        start = derive_seed(self.seed, "demonstration", step, task.uid) % len(available)
        wanted = self.group.off_policy if self.group.choose == "in_turn" else len(available)
        count = wanted if prefix else min(wanted, len(available))
        stride = 0 if prefix and prefix.shared else 1
        return [available[(start + i * stride) % len(available)] for i in range(count)]

    def _num_given(self, trace: Demonstration, visit: Visit, index: int, count: int) -> int:
        """Tokens of the trace that off-policy row `index` of `count` begins with."""
        if self.group.prefix is None:
            return len(trace.token_ids)
        length = len(trace.token_ids)
        wanted = prefix_length(self.group.prefix, length, visit, index, count, self.total_steps, self.seed)
        if self.stops is not None:  # no stop text in the prefix, so that the policy has something left to write
            wanted = self.stops.before_first(trace.token_ids[:wanted])
        while wanted and trace.source and trace.source[wanted - 1] is Source.ENVIRONMENT:
            wanted -= 1  # the prefix ends with a turn of the assistant, which the live environment answers itself
        return wanted

    def _with_traces(
        self, visits: Sequence[Visit], groups: Sequence[Group], sample: _Sample, bound: float
    ) -> list[Group]:
        """Whole traces in place of the last wrong rollouts (`group.off_policy_when_accuracy_at_most`). Others among
        which the trainer is to choose go to `Group.replaced` (`luffy.rl.trace_choice`)."""
        plans = [
            [
                Row(visit.task.prompt_ids, trace=trace, num_given=len(trace.token_ids))
                for trace in (self._traces(visit.task, visit.step) if _fails(group, bound) else ())
            ]
            for visit, group in zip(visits, groups, strict=True)
        ]
        changed = []
        chosen_later = self.group.choose != "in_turn"
        for group, found in zip(groups, sample(plans), strict=True):
            wrong = [row for row in group.rollouts if not row.is_correct]
            traces = [row for row in found if row.is_correct] if chosen_later else found
            count = min(len(traces), len(wrong), self.group.off_policy)
            leaving, surplus = wrong[len(wrong) - count :], traces[count:] if chosen_later else []
            staying = tuple(row for row in group.trajectories if not any(row is other for other in leaving))
            changed.append(replace(group, trajectories=(*staying, *traces[:count]), replaced=(*leaving, *surplus)))
        return changed

    def _with_hints(self, visits: Sequence[Visit], groups: Sequence[Group], sample: _Sample) -> list[Group]:
        """Rollouts under a prompt that shows more (`group.hint`, `group.retry`), in place of others."""
        second = self.group.hint or self.group.retry
        assert second is not None
        plans: list[list[Row]] = []
        for visit, group in zip(visits, groups, strict=True):
            task, step = visit.task, visit.step
            prompts = self._hinted_prompts(visit, group) if _fails(group, second.accuracy_at_most) else []
            plans.append([])
            for place, prompt in enumerate(prompts, start=visit.repeat * second.num_rows):
                seed = derive_seed(self.seed, "hinted rollout", step, task.uid, place)
                plans[-1].append(Row(task.prompt_ids, seed, hinted=prompt))
        if not any(plans):
            return list(groups)
        return [
            with_hinted_rows(group, rows, second.keep) if rows else group
            for group, rows in zip(groups, sample(plans), strict=True)
        ]

    def _hinted_prompts(self, visit: Visit, group: Group) -> list[HintedPrompt]:
        if self.retries is not None:
            return self.retries.of(visit.task, group.rollouts)
        assert self.hints is not None
        return self.hints.of(visit.task, visit.step) if self.hints.are_due(visit.step) else []

    def _anchored(
        self, visits: Sequence[Visit], groups: Sequence[Group], sample: _Sample, anchors: Anchors
    ) -> list[Group]:
        """Groups that continue the start of a trace (`group.anchor`), as much of it as the policy needs to succeed
        sometimes."""
        searches = [
            anchors.search(visit.task, visit.step) if _fails(group, anchors.config.accuracy_at_most) else None
            for visit, group in zip(visits, groups, strict=True)
        ]
        while any(search is not None and search.num_pieces is not None for search in searches):
            plans = [self._branches(search, visit) for search, visit in zip(searches, visits, strict=True)]
            for search, rows in zip(searches, sample(plans), strict=True):
                if search is not None and rows:
                    search.observe(rows)
        return [
            group if search is None else search.group(group) for search, group in zip(searches, groups, strict=True)
        ]

    def _branches(self, search: AnchorSearch | None, visit: Visit) -> list[Row]:
        """The rows of a group for the next try of a search; empty where the search is over."""
        if search is None or search.num_pieces is None:
            return []
        given, size = search.num_given, self.group.size
        if self.stops is not None:  # no stop text in the prefix, so that the policy has something left to write
            given = self.stops.before_first(search.trace.token_ids[:given])
        uid, places = visit.task.uid, range(visit.repeat * size, (visit.repeat + 1) * size)
        seeds = [derive_seed(self.seed, "branch", visit.step, uid, search.num_pieces, place) for place in places]
        return [Row(visit.task.prompt_ids, seed, search.trace, given) for seed in seeds]


def _fails(group: Group, accuracy_at_most: float) -> bool:
    """Whether the rollouts call for the fallback. Where the environment failed in all of them, or some are interrupted,
    nothing is known."""
    return bool(group.rollouts) and not group.is_open and group.accuracy <= accuracy_at_most


def _continued(group: Group, rows: Sequence[Trajectory]) -> Group:
    """The open group with `rows` in place of its interrupted ones."""
    each = iter(rows)
    trajectories = [next(each) if row.finish_reason is FinishReason.INTERRUPTED else row for row in group.trajectories]
    return replace(group, trajectories=tuple(trajectories))


def _replayed(task: RolloutTask) -> tuple[Trajectory, ...]:
    return () if task.replayed is None else (replayed_row(task.replayed),)


def kept_groups(groups: Sequence[Group], group_filter: GroupFilter | None, wanted: int) -> list[Group]:
    """The groups to train on, in order; possibly none.

    Groups that are not learnable (`Group.is_learnable`) are left out. No filter keeps all others, `drop_zero_variance`
    drops the zero-variance ones, and `dynamic_sampling` then keeps the first `wanted` of the rest (DAPO, arXiv
    2503.14476, section 3.2).
    """
    learnable = [group for group in groups if group.is_learnable]
    if group_filter is None:
        return learnable
    varied = [group for group in learnable if len(set(group.rewards)) > 1]
    return varied[:wanted] if isinstance(group_filter, DynamicSampling) else varied


def needs_more(groups: Sequence[Group], group_filter: GroupFilter | None, wanted: int, rounds_done: int) -> bool:
    """Whether another round of rollouts is needed, given the groups of the first `rounds_done` rounds."""
    if not isinstance(group_filter, DynamicSampling) or rounds_done >= group_filter.max_rounds:
        return False
    return len(kept_groups(groups, group_filter, wanted)) < wanted


Decode = Callable[[Sequence[int]], str]


def sample_rollouts(
    groups: Sequence[Group],
    config: AdvantageConfig,
    count: int,
    decode_prompt: Decode,
    decode_response: Decode,
    references: Mapping[str, str | None],
) -> list[SampleRollout]:
    """One row of each of the first `count` groups: the first row, but the last row, often a trace, of the last group.

    Failed rows, which have no advantage, are shown where a group has no others. `references`: the reference answer by
    uid, None for a confidential prompt, whose group is left out.
    """
    if isinstance(config, GroupAdvantage):
        advantages: Iterator[float | None] = iter(row_advantages(groups, config).tolist())
    else:
        advantages = itertools.repeat(None)
    pairs: list[tuple[Group, list[tuple[Trajectory, float | None]]]] = [
        (group, [(row, next(advantages)) for row in group.trajectories]) for group in groups
    ]
    chosen = [(group, rows) for group, rows in pairs if references.get(group.uid, "") is not None][:count]
    samples = []
    for index, (group, rows) in enumerate(chosen):
        shown = rows or [(row, None) for row in group.failed]
        row, advantage = shown[-1] if index == len(chosen) - 1 else shown[0]
        samples.append(
            SampleRollout(
                uid=group.uid,
                prompt=decode_prompt(row.prompt_ids),
                response=transcript(row.response_ids, row.source, decode_response, row.prompt_ids, row.context_starts),
                source="off_policy" if row.is_off_policy else "on_policy",
                reward=row.reward,
                outcome=row.outcome.value,
                advantage=advantage,
                reference=references.get(group.uid) or "",
                measures=dict(row.measures),
                hint_level=None if row.hint is None else row.hint.level,
                hint="" if row.hint is None else row.hint.text,
            )
        )
    return samples

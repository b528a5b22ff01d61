"""Builds graded groups from prompts, and chooses those that a step trains on.

A group has rollouts of the bare prompt, rows with a start (`luffy.rl.group_starts`) and replayed rows. They are sampled
in one launch, then in further ones where a start has several rounds or waits for what the rollouts bring.

A zero-variance group is one whose rewards are all equal, over rollouts, off-policy and replayed rows together: with the
joint population, it has no policy gradient. The same rule applies under `advantage.population: on_policy`, and keeps a
group of wrong rollouts with a correct trace, which contributes through the supervised term.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from luffy.config.group import AdvantageConfig, DynamicSampling, GroupAdvantage, GroupConfig, GroupFilter
from luffy.config.starts import Critique, SearchDose
from luffy.config.training import OverlongConfig
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.limits import refuse_failures
from luffy.environments.transcript import transcript
from luffy.grading.request import Grader
from luffy.rl.doses import Ask, StartRound
from luffy.rl.group_starts import GroupStart, Slot, under
from luffy.rl.rows import RolloutTask, Row, RowSampler, Visit, replayed_row
from luffy.rollout.engine import RolloutEngine, SamplingParams, StopTexts
from luffy.seeds import derive_seed
from luffy.tracking.tracker import SampleRollout
from luffy.training.batching import row_advantages
from luffy.types import FinishReason, Group, Start, Trajectory


@dataclass(slots=True)
class _Draft:
    """A group in the making."""

    visit: Visit
    slots: dict[str, list[Slot | None]]
    """By start: the traces of its rows."""
    num_bare: int
    rows: list[Trajectory] = field(default_factory=list)
    """Those sampled so far, in order; without those of fallbacks."""
    taken: Counter[str] = field(default_factory=Counter)
    """Slots of each start that were planned."""
    rounds: Counter[str] = field(default_factory=Counter)
    tried: dict[str, list[StartRound]] = field(default_factory=dict)
    failed: list[Trajectory] = field(default_factory=list)
    num_planned: int = 0
    """Rows without those of fallbacks."""

    def group(self) -> Group:
        """The group as far as it is known, without fallbacks."""
        task = self.visit.task
        if task.begun is not None:
            return _continued(task.begun, self.rows)
        return Group(task.uid, (*self.rows, *_replayed(task)))


@dataclass(slots=True)
class GroupCollector:
    """Plans the rows of each group, and has them sampled and graded.

    A group has rollouts, then the rows of each start in order, then the replayed row, which is not graded again. A
    prompt with too few traces gets more rollouts instead. Rows whose environment failed are kept apart
    (`Group.failed`), so a group may have fewer rows than planned. With `step_tokens` a group may stay open
    (`Group.is_open`).

    For `decode`, `player` and `stops` see `RowSampler`; `starts` are those of `group`.
    """

    grader: Grader
    decode: Callable[[Sequence[int]], str]
    params: SamplingParams
    group: GroupConfig
    seed: int
    total_steps: int
    starts: Sequence[GroupStart] = ()
    player: EpisodePlayer | None = None
    stops: StopTexts | None = None
    overlong: OverlongConfig | None = None
    step_tokens: int | None = None
    sampler: RowSampler = field(init=False)

    def __post_init__(self) -> None:
        assert [start.name for start in self.starts] == [*self.group.starts], "starts come with their section"
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
        seen, drafts = Counter(earlier), list[_Draft]()
        for task in tasks:
            drafts.append(self._draft(Visit(task, step, seen[task.uid])))
            seen[task.uid] += 1
        episodes: list[FinishReason] = []  # the end of every row that was played
        plans = [self._first(draft) for draft in drafts]
        while any(plans):
            for draft, plan, found in zip(drafts, plans, self.sampler.sample(engine, tasks, plans), strict=True):
                pairs = zip(plan, found, strict=True)
                episodes.extend(row.finish_reason for planned, row in pairs if self.sampler.is_played(planned))
                self._enter(draft, plan, found)
            plans = [self._next(draft) for draft in drafts]
        if self.player is not None:
            refuse_failures(episodes, self.player.limits)
        return [self._finished(draft) for draft in drafts]

    def grading_s(self) -> float:
        """Seconds spent on grading since the last call."""
        return self.sampler.grading_s()

    def _draft(self, visit: Visit) -> _Draft:
        """How many rows of a group each start has, and their traces."""
        if visit.task.begun is not None:
            return _Draft(visit, {}, 0)
        present = [start for start in self.starts if not start.config.is_fallback and start.is_in(visit)]
        room = self.group.size - len(_replayed(visit.task))
        numbers = {start.name: start.config.rows for start in present if isinstance(start.config.rows, int)}
        rest = room - sum(numbers.values())
        slots = {start.name: start.slots(visit, numbers.get(start.name, rest)) for start in present}
        return _Draft(visit, slots, room - sum(map(len, slots.values())))

    def _first(self, draft: _Draft) -> list[Row]:
        """The rows of the first launch: rollouts, then those of starts that wait for nothing; of an open group the
        interrupted ones."""
        visit, begun = draft.visit, draft.visit.task.begun
        if begun is not None:
            rows = [row for row in begun.trajectories if row.finish_reason is FinishReason.INTERRUPTED]
            seed = partial(derive_seed, self.seed, "continued", visit.step, visit.task.uid)
            return [
                Row(row.prompt_ids, seed(place), begun=row, start=row.start)
                for place, row in enumerate(rows, start=visit.repeat * self.group.size)
            ]
        first = visit.repeat * self.group.size
        plan = [
            Row(visit.task.prompt_ids, derive_seed(self.seed, "rollout", visit.step, visit.task.uid, place))
            for place in range(first, first + draft.num_bare)
        ]
        draft.num_planned = draft.num_bare
        for start in self.starts:
            if not start.waits:
                plan += self._round(draft, start)
        return plan

    def _next(self, draft: _Draft) -> list[Row]:
        """The rows of the next launch: a further round of a start, or the first of one that waits; at last those of a
        fallback. Empty where the group is complete."""
        for start in self.starts:
            if not start.config.is_fallback and (plan := self._round(draft, start)):
                return plan
        for start in self.starts:
            if start.config.is_fallback and (plan := self._fallback(draft, start)):
                return plan
        return []

    def _round(self, draft: _Draft, start: GroupStart) -> list[Row]:
        """The next round of a start that takes the places of rollouts."""
        slots, taken = draft.slots.get(start.name, ()), draft.taken[start.name]
        if taken >= len(slots):
            return []
        count = start.rows_in_round(draft.rounds[start.name], len(slots))
        first = draft.visit.repeat * self.group.size + draft.num_planned
        rows = []
        for place, slot in enumerate(slots[taken : taken + count]):
            row = start.row(draft.visit, slot, first + place, partial(self._ask, draft, start, taken + place))
            assert row is not None, "only a search ends by itself"
            rows.append(row)
        draft.taken[start.name] += len(rows)
        draft.rounds[start.name] += 1
        draft.num_planned += len(rows)
        return rows

    def _fallback(self, draft: _Draft, start: GroupStart) -> list[Row]:
        """The next round of a start that is for groups whose rollouts fail."""
        visit, group = draft.visit, draft.group()
        is_over = draft.rounds[start.name] > 0 and not isinstance(start.config.dose, SearchDose)
        if is_over or not start.is_due(visit, group):
            return []
        count = start.config.num_rows(self.group.size)
        draft.rounds[start.name] += 1
        first = visit.repeat * count
        if isinstance(start.config.show, Critique):
            return [
                under(Row(visit.task.prompt_ids, start.seed_of(visit, place), start=Start(start.name)), prompt)
                for place, prompt in enumerate(start.critiques(visit, group.rollouts), start=first)
            ]
        if start.name not in draft.slots:
            draft.slots[start.name] = start.slots(visit, count)
        rows = []
        for index, slot in enumerate(draft.slots[start.name]):
            row = start.row(visit, slot, first + index, partial(self._ask, draft, start, index))
            if row is None:
                return []
            rows.append(row)
        return rows

    def _ask(self, draft: _Draft, start: GroupStart, index: int, length: int) -> Ask:
        visit, rows = draft.visit, draft.rows
        bare = [row for row in rows if row.start is None]
        return Ask(
            step=visit.step,
            total_steps=self.total_steps,
            index=0 if start.config.shared else index,
            count=len(draft.slots[start.name]),
            length=length,
            random=start.random(visit, index),
            known=visit.task.known.get(start.name, {}),
            round=draft.rounds[start.name],
            so_far=sum(row.is_correct for row in rows) / len(rows) if rows else None,
            bare=sum(row.is_correct for row in bare) / len(bare) if bare else None,
            tried=tuple(draft.tried.get(start.name, ())),
        )

    def _enter(self, draft: _Draft, plan: Sequence[Row], found: Sequence[Trajectory]) -> None:
        """Put the sampled rows of a launch into their group; those whose environment failed, apart."""
        draft.failed += [row for row in found if row.has_failed]
        if draft.visit.task.begun is not None:
            draft.rows += found
            return
        rows = [row for row in found if not row.has_failed]
        doses = {row.start.name: row.start.dose for row in reversed(plan) if row.start is not None}
        for start in self.starts:
            if start.name in doses:
                own = tuple(row for row in rows if row.start is not None and row.start.name == start.name)
                draft.tried.setdefault(start.name, []).append(StartRound(doses[start.name] or 0.0, own))
        if not any(start.config.is_fallback and start.name in doses for start in self.starts):
            draft.rows += rows

    def _finished(self, draft: _Draft) -> Group:
        group = draft.group()
        for start in self.starts:
            if start.config.is_fallback and start.name in draft.tried:
                group = start.changed(group, draft.tried[start.name])
        return replace(group, failed=(*group.failed, *draft.failed))


def _continued(group: Group, rows: Sequence[Trajectory]) -> Group:
    """The open group with `rows` in place of its interrupted ones, without those that failed."""
    each = iter(rows)
    trajectories = [next(each) if row.finish_reason is FinishReason.INTERRUPTED else row for row in group.trajectories]
    return replace(group, trajectories=tuple(row for row in trajectories if not row.has_failed))


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
                start=None if row.start is None else row.start.name,
                dose=None if row.start is None else row.start.dose,
                hint=(row.start.shown if row.start is not None else None) or "",
            )
        )
    return samples

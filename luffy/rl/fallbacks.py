"""Fallbacks: what a group gets where its rollouts fail, namely whole traces, hinted rollouts or branches off a trace.

A configuration has at most one of them (`GroupConfig`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from luffy.rl.rows import Demonstration, RolloutTask, Row, Visit
from luffy.rl.trace_starts import Anchors, AnchorSearch, HintedPrompts, with_hinted_rows
from luffy.rollout.stop_texts import StopTexts
from luffy.seeds import derive_seed
from luffy.types import Group, Trajectory

SampleRows = Callable[[Sequence[Sequence[Row]]], list[list[Trajectory]]]
"""Samples and grades the rows planned for each task of the step; a plan may be empty."""


class Fallback(Protocol):
    """Changes the groups of prompts whose rollouts fail."""

    def apply(self, visits: Sequence[Visit], groups: Sequence[Group], sample: SampleRows) -> list[Group]:
        """The groups of the visits, in order; those that do not fail are returned as they are."""
        ...


@dataclass(frozen=True, slots=True)
class TraceFallback:
    """Whole traces in place of wrong rollouts (`group.off_policy_when_accuracy_at_most`)."""

    accuracy_at_most: float
    traces: Callable[[RolloutTask, int], Sequence[Demonstration]]
    """The traces of a task in a step."""

    def apply(self, visits: Sequence[Visit], groups: Sequence[Group], sample: SampleRows) -> list[Group]:
        plans = [
            [_whole(visit.task, trace) for trace in self.traces(visit.task, visit.step)]
            if _fails(group, self.accuracy_at_most)
            else []
            for visit, group in zip(visits, groups, strict=True)
        ]
        return [_in_place_of_wrong(*pair) for pair in zip(groups, sample(plans), strict=True)]


@dataclass(frozen=True, slots=True)
class HintFallback:
    """Rollouts under a prompt that shows the first steps of a trace (`group.hint`), in place of wrong ones."""

    prompts: HintedPrompts
    seed: int

    def apply(self, visits: Sequence[Visit], groups: Sequence[Group], sample: SampleRows) -> list[Group]:
        config = self.prompts.config
        plans = [
            self._rows(visit) if self.prompts.are_due(visit.step) and _fails(group, config.accuracy_at_most) else []
            for visit, group in zip(visits, groups, strict=True)
        ]
        if not any(plans):
            return list(groups)
        return [
            with_hinted_rows(group, rows, config) if rows else group
            for group, rows in zip(groups, sample(plans), strict=True)
        ]

    def _rows(self, visit: Visit) -> list[Row]:
        task, step = visit.task, visit.step
        prompts = self.prompts.of(task, step)
        return [
            Row(
                task.prompt_ids,
                derive_seed(self.seed, "hinted rollout", step, task.uid, visit.repeat * len(prompts) + index),
                hinted=prompt,
            )
            for index, prompt in enumerate(prompts)
        ]


@dataclass(frozen=True, slots=True)
class AnchorFallback:
    """Groups that continue the start of a trace (`group.anchor`), as much of it as the policy needs to succeed
    sometimes."""

    anchors: Anchors
    group_size: int
    seed: int
    stops: StopTexts | None

    def apply(self, visits: Sequence[Visit], groups: Sequence[Group], sample: SampleRows) -> list[Group]:
        bound = self.anchors.config.accuracy_at_most
        searches = [
            self.anchors.search(visit.task, visit.step) if _fails(group, bound) else None
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
        given, size = search.num_given, self.group_size
        if self.stops is not None:  # no stop text in the prefix, so that the policy has something left to write
            given = self.stops.before_first(search.trace.token_ids[:given])
        seeds = (
            derive_seed(self.seed, "branch", visit.step, visit.task.uid, search.num_pieces, visit.repeat * size + index)
            for index in range(size)
        )
        return [Row(visit.task.prompt_ids, seed, search.trace, given) for seed in seeds]


def _fails(group: Group, accuracy_at_most: float) -> bool:
    """Whether the rollouts call for the fallback. Where the environment failed in all of them, nothing is known."""
    return bool(group.rollouts) and group.accuracy <= accuracy_at_most


def _whole(task: RolloutTask, trace: Demonstration) -> Row:
    return Row(task.prompt_ids, trace=trace, num_given=len(trace.token_ids))


def _in_place_of_wrong(group: Group, traces: Sequence[Trajectory]) -> Group:
    """The group with its last wrong rollouts replaced by traces; surplus traces are left out."""
    wrong = [row for row in group.rollouts if not row.is_correct]
    count = min(len(traces), len(wrong))
    leaving = wrong[len(wrong) - count :]
    staying = tuple(row for row in group.trajectories if not any(row is other for other in leaving))
    return Group(group.uid, (*staying, *traces[:count]), replaced=tuple(leaving))

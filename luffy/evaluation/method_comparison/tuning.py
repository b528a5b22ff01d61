"""Results of tuning the arms of a comparison: the tried points, the chosen ones, and the costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from luffy.config.many_runs.grid import GridPoint, is_number, value_text
from luffy.evaluation.method_comparison.arms import Costs, FinishedSeed, stage_costs, total_costs
from luffy.evaluation.method_comparison.seed_scores import Score, score
from luffy.evaluation.results import Cell

Resource = Literal["optimizer_steps", "rollouts"]
"""Unit of the lengths of rungs: a field of `Costs`."""


@dataclass(frozen=True, slots=True)
class Try:
    """One arm at one point of its grid, on one rung."""

    point: GridPoint
    seeds: tuple[FinishedSeed, ...]
    failures: Mapping[int, str]
    """Seed to one line."""
    score: Score | None
    """None where a seed has failed: a mean over fewer seeds would not be comparable."""


def tried(
    point: GridPoint, seeds: Sequence[FinishedSeed], failures: Mapping[int, str], cell: Cell, confidence: float
) -> Try:
    """The try at `point`, scored by the suite and decoding `cell`."""
    return Try(point, tuple(seeds), failures, None if failures else score(seeds, cell, confidence))


def best(tries: Sequence[Try], count: int) -> tuple[Try, ...]:
    """The tries with the highest accuracies, at most `count`, in their order; of equal ones the first.

    A try with a failed seed is never among them.
    """
    scored = [(-each.score.estimate.value, place) for place, each in enumerate(tries) if each.score is not None]
    kept = {place for _, place in sorted(scored)[:count]}
    return tuple(each for place, each in enumerate(tries) if place in kept)


@dataclass(frozen=True, slots=True)
class ArmTuning:
    """All tries of one arm."""

    arm: str
    rungs: tuple[tuple[Try, ...], ...]
    """The tries of each rung in the order of the grid; a single rung without successive halving. Empty from the rung on
    for which no try is left."""

    @property
    def tries(self) -> tuple[Try, ...]:
        """Each point on the last rung that it reached, in the order of the grid."""
        last = {each.point.number: each for rung in self.rungs for each in rung}
        return tuple(last[each.point.number] for each in self.rungs[0])

    @property
    def chosen(self) -> Try | None:
        """The try of the last rung with the highest accuracy, of equal ones the first in the grid; None without any."""
        return next(iter(best(self.rungs[-1], 1)), None)

    @property
    def warnings(self) -> list[str]:
        """A line for each choice that is not to be trusted: a value at an edge of what was tried, or equal tries.

        Empty where nothing was chosen.
        """
        chosen = self.chosen
        if chosen is None:
            return []
        accuracies = _accuracies(self.rungs[-1])
        if len(accuracies) > 1 and len(set(accuracies)) == 1:
            return [*self._ties(), f"{self.arm}: all {self._last}points are equally accurate; the first was chosen"]
        return [*self._ties(), *self._edges(chosen)]

    @property
    def costs(self) -> Costs:
        """What all finished tries have spent together.

        A stage that several of them share, and one that later rungs continue, is counted once.
        """
        return total_costs(stage_costs(seed for seed, _ in self._longest()).values())

    def costs_of_full_grid(self, resource: Resource, lengths: Sequence[int]) -> Costs:
        """An estimate of `costs` without rungs, whose lengths are `lengths`: the last stage of each try at its pace."""
        spent = stage_costs(seed for seed, _ in self._longest())
        for seed, rung in self._longest():
            *earlier, last = seed.trained.values()
            # The planned length of the last stage, not the actual one: a step whose groups are all filtered out adds
            # nothing.
            own = _less(lengths[rung], [getattr(spent[stage], resource) for stage in earlier])
            spent[last] = _prolonged(spent[last], 1 + (lengths[-1] - lengths[rung]) / own if own else None)
        return total_costs(spent.values())

    def _longest(self) -> Iterator[tuple[FinishedSeed, int]]:
        """The longest finished run of each point and seed, and the place of its rung."""
        found = {
            (each.point.number, seed.seed): (seed, place)
            for place, rung in enumerate(self.rungs)
            for each in rung
            for seed in each.seeds
        }
        return iter(found.values())

    @property
    def _last(self) -> str:
        return "tried " if len(self.rungs) == 1 else "remaining "

    def _ties(self) -> Iterator[str]:
        """A line for each rung from which only some of equally accurate tries went on."""
        for number, (tries, following) in enumerate(pairwise(self.rungs), start=1):
            kept = {each.point.number for each in following}
            dropped = _accuracies([each for each in tries if each.point.number not in kept])
            if set(dropped) & set(_accuracies([each for each in tries if each.point.number in kept])):
                yield f"{self.arm}: rung {number}: of tries with equal accuracy, the first in the grid went on"

    def _edges(self, chosen: Try) -> Iterator[str]:
        for key, value in chosen.point.values:
            there = [dict(each.point.values)[key] for each in self.tries]
            numbers = [number for number in there if isinstance(number, int | float) and is_number(number)]
            if len(numbers) < len(there) or min(numbers) == max(numbers):
                continue
            if value in (min(numbers), max(numbers)):
                side, more = ("smallest", "smaller") if value == min(numbers) else ("largest", "larger")
                yield (
                    f"{self.arm}: {key}={value_text(value)} was chosen, the {side} value tried; a {more} one may be "
                    "better"
                )


@dataclass(frozen=True, slots=True)
class Halving:
    """The rungs of successive halving, the same for every arm."""

    eta: int
    resource: Resource
    lengths: tuple[int, ...]
    """Length of each rung, in `resource`; the last is the whole budget."""
    num_tries: tuple[int, ...]
    """Tries of each arm on each rung."""

    @property
    def unit(self) -> str:
        """`resource` in words."""
        return self.resource.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tuning of every arm, each with equally many tries."""

    on: str
    """The suite, or `validation`."""
    decoding: str
    seeds: tuple[int, ...]
    is_random: bool
    """Whether the tries were sampled from larger grids."""
    arms: tuple[ArmTuning, ...]
    halving: Halving | None = None
    """None: every try got the whole budget."""

    @property
    def num_tries(self) -> int:
        """Tries of each arm."""
        return len(self.arms[0].tries)

    def chosen(self, arm: str) -> Try | None:
        """The chosen try of an arm."""
        return next(each.chosen for each in self.arms if each.arm == arm)

    @property
    def warnings(self) -> list[str]:
        """A line for each choice that is not to be trusted, such as a value at an edge of what was tried."""
        return [line for arm in self.arms for line in arm.warnings]

    @property
    def failures(self) -> list[str]:
        """A line for each run that failed."""
        return [
            f"{arm.arm}, {each.point.text}, seed {seed}: {reason}"
            for arm in self.arms
            for rung in arm.rungs
            for each in rung
            for seed, reason in each.failures.items()
        ]

    def costs_of_full_grid(self, arm: ArmTuning) -> Costs | None:
        """An estimate of what the whole budget for every try of `arm` would have cost; None where that was done."""
        halving = self.halving
        return None if halving is None else arm.costs_of_full_grid(halving.resource, halving.lengths)


def tuning_values(tuning: Tuning) -> dict[str, Any]:
    """All results of tuning as JSON values."""
    return {
        "on": tuning.on,
        "decoding": tuning.decoding,
        "seeds": tuning.seeds,
        "random": tuning.is_random,
        "warnings": tuning.warnings,
        "arms": [
            {
                "arm": arm.arm,
                "tries": [_try(each) for each in arm.tries],
                "chosen": dict(arm.chosen.point.values) if arm.chosen is not None else None,
                "cost": arm.costs.values(),
                **_halving_values(tuning, arm),
            }
            for arm in tuning.arms
        ],
    }


def _halving_values(tuning: Tuning, arm: ArmTuning) -> dict[str, Any]:
    halving, full = tuning.halving, tuning.costs_of_full_grid(arm)
    if halving is None or full is None:
        return {}
    rungs = zip(halving.lengths, arm.rungs, strict=False)
    return {
        "rungs": [{halving.resource: length, "tries": [_try(each) for each in rung]} for length, rung in rungs],
        "estimated_cost_of_full_grid": full.values(),
    }


def _try(each: Try) -> dict[str, Any]:
    accuracy = None
    if each.score is not None:
        estimate = each.score.estimate
        accuracy = {"value": estimate.value, "low": estimate.low, "high": estimate.high, "by_seed": each.score.by_seed}
    return {"values": dict(each.point.values), "accuracy": accuracy, "failures": dict(each.failures)}


def _accuracies(tries: Sequence[Try]) -> list[float]:
    return [each.score.estimate.value for each in tries if each.score is not None]


def _less(total: int, parts: Sequence[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return total - sum(known) if len(known) == len(parts) else None


def _prolonged(costs: Costs, factor: float | None) -> Costs:
    """`costs` scaled to a stage that is longer by `factor`, except peak memory; unknown where `factor` is."""
    scaled = {
        name: None if value is None or factor is None else value * factor for name, value in costs.values().items()
    }
    return replace(Costs(**scaled), peak_memory_gib=costs.peak_memory_gib)

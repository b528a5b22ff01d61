"""Results of tuning the arms of a comparison: the tried points, the chosen ones, and the costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luffy.config.many_runs.grid import GridPoint, is_number, value_text
from luffy.evaluation.method_comparison.arms import Costs, FinishedSeed, stage_costs, total_costs
from luffy.evaluation.method_comparison.seed_scores import Score, score
from luffy.evaluation.results import Cell


@dataclass(frozen=True, slots=True)
class Try:
    """One arm at one point of its grid."""

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


@dataclass(frozen=True, slots=True)
class ArmTuning:
    """All tries of one arm."""

    arm: str
    tries: tuple[Try, ...]
    """In the order of the grid."""

    @property
    def chosen(self) -> Try | None:
        """The try with the highest accuracy, of equal ones the first in the grid; None without any.

        A try with a failed seed is never chosen.
        """
        scored = [(each.score.estimate.value, each) for each in self.tries if each.score is not None]
        return max(scored, key=lambda pair: pair[0])[1] if scored else None

    @property
    def warnings(self) -> list[str]:
        """A line for each choice that is not to be trusted: a value at an edge of what was tried, or equal tries.

        Empty where nothing was chosen.
        """
        chosen = self.chosen
        if chosen is None:
            return []
        accuracies = [each.score.estimate.value for each in self.tries if each.score is not None]
        if len(accuracies) > 1 and len(set(accuracies)) == 1:
            return [f"{self.arm}: all tried points are equally accurate; the first was chosen"]
        return list(self._edges(chosen))

    @property
    def costs(self) -> Costs:
        """What all finished tries have spent together; a stage that several of them share is counted once."""
        return total_costs(stage_costs(seed for each in self.tries for seed in each.seeds).values())

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
class Tuning:
    """The tuning of every arm, each with equally many tries."""

    on: str
    """The suite, or `validation`."""
    decoding: str
    seeds: tuple[int, ...]
    is_random: bool
    """Whether the tries were sampled from larger grids."""
    arms: tuple[ArmTuning, ...]

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
            for each in arm.tries
            for seed, reason in each.failures.items()
        ]


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
            }
            for arm in tuning.arms
        ],
    }


def _try(each: Try) -> dict[str, Any]:
    accuracy = None
    if each.score is not None:
        estimate = each.score.estimate
        accuracy = {"value": estimate.value, "low": estimate.low, "high": estimate.high, "by_seed": each.score.by_seed}
    return {"values": dict(each.point.values), "accuracy": accuracy, "failures": dict(each.failures)}

"""The numbers of a study, from its results alone: accuracies, planned tests with Holm's correction, other effects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from luffy.config.many_runs.study import Study
from luffy.config.many_runs.study_config import CENTRE, StudyConfig
from luffy.errors import DataError
from luffy.evaluation.method_comparison.seed_scores import Score
from luffy.evaluation.results import Cell
from luffy.evaluation.study.study_results import BASE, REPORTED, OutcomeRow, StudyResults
from luffy.statistics.over_seeds import SeededDifference, seeded_accuracy, seeded_difference
from luffy.statistics.paired import holm

Verdict = Literal["ahead", "behind", "not distinguishable"]


@dataclass(frozen=True, slots=True)
class Effect:
    """An arm minus the reference, in one cell on one suite under one decoding."""

    result: SeededDifference
    seeds: tuple[int, ...]
    """Seeds that both have."""
    adjusted_p: float | None
    """After Holm's correction over the planned tests; None: exploratory."""
    confidence: float

    @property
    def is_planned(self) -> bool:
        return self.adjusted_p is not None

    @property
    def p_value(self) -> float:
        """The corrected p-value of a planned test, else the uncorrected one."""
        return self.result.p_value if self.adjusted_p is None else self.adjusted_p

    @property
    def verdict(self) -> Verdict:
        if self.p_value >= 1 - self.confidence:
            return "not distinguishable"
        return "ahead" if self.result.difference.value > 0 else "behind"


@dataclass(frozen=True, slots=True)
class StudyFindings:
    """All numbers of a study."""

    config: StudyConfig
    confidence: float
    measured: tuple[Cell, ...]
    """Suites by decoding, the primary one first."""
    scores: Mapping[tuple[str, str, Cell], Score]
    """By cell of the design, arm ("": the base), and suite with decoding."""
    effects: Mapping[tuple[str, str, Cell], Effect]

    @property
    def primary(self) -> Cell:
        return self.config.primary.suite, self.config.primary.decoding

    @property
    def others(self) -> tuple[str, ...]:
        """The arms without the reference."""
        return tuple(name for name in self.config.arms if name != self.config.reference)

    @property
    def missing(self) -> list[tuple[str, str]]:
        """Planned tests that the results do not have yet."""
        return [each for each in self.config.planned if (*each, self.primary) not in self.effects]

    def effect(self, cell: str, arm: str) -> Effect | None:
        """On the primary measure."""
        return self.effects.get((cell, arm, self.primary))


def find_effects(study: Study, results: StudyResults) -> StudyFindings:
    """The findings; DataError where the arms of a cell were evaluated on different problems."""
    config = study.config
    evaluation = study.comparison(CENTRE).candidates[0].config.evaluation
    assert evaluation is not None
    confidence = evaluation.confidence
    rows = _by_place(results)
    primary = (config.primary.suite, config.primary.decoding)
    measured = tuple(dict.fromkeys([primary, *(place[2] for place in rows)]))
    order = {name: number for number, name in enumerate(config.cells)}
    places = sorted((place for place in rows if place[0] in order), key=lambda place: order[place[0]])
    scores = {place: _score(rows[place], confidence) for place in places}
    differences = {
        (cell, arm, on): _difference(first, rows[cell, arm, on], confidence)
        for cell, arm, on in places
        if arm not in ("", config.reference) and (first := rows.get((cell, config.reference, on))) is not None
    }
    known = {place: each for place, each in differences.items() if each is not None}
    adjusted = _planned(config, known, primary)
    effects = {
        place: Effect(result, seeds, adjusted.get(place), confidence) for place, (result, seeds) in known.items()
    }
    return StudyFindings(config, confidence, measured, scores, effects)


def _planned(
    config: StudyConfig,
    known: Mapping[tuple[str, str, Cell], tuple[SeededDifference, tuple[int, ...]]],
    primary: Cell,
) -> dict[tuple[str, str, Cell], float]:
    """Holm-corrected p-values of all planned tests; a test without results counts as p = 1, so that missing runs make
    no other test more significant."""
    places = [(cell, arm, primary) for cell, arm in config.planned]
    adjusted = holm([known[place][0].p_value if place in known else 1.0 for place in places])
    return dict(zip(places, adjusted, strict=True))


def _by_place(results: StudyResults) -> dict[tuple[str, str, Cell], dict[int, OutcomeRow]]:
    found: dict[tuple[str, str, Cell], dict[int, OutcomeRow]] = {}
    for row in results.outcomes:
        if row.role in (REPORTED, BASE):
            found.setdefault((row.cell, row.arm, (row.suite, row.decoding)), {})[row.seed] = row
    return found


def _score(rows: Mapping[int, OutcomeRow], confidence: float) -> Score:
    first = next(iter(rows.values()))
    counts = [row.correct for row in rows.values()]
    by_seed = {seed: sum(row.correct) / (row.num_samples * len(row.correct)) for seed, row in rows.items()}
    return Score(seeded_accuracy(counts, first.num_samples, confidence), by_seed)


def _difference(
    first: Mapping[int, OutcomeRow], second: Mapping[int, OutcomeRow], confidence: float
) -> tuple[SeededDifference, tuple[int, ...]] | None:
    """The difference over the seeds that both have, and these seeds; None without any."""
    seeds = tuple(seed for seed in first if seed in second)
    if not seeds:
        return None
    for seed in seeds:
        if first[seed].problems != second[seed].problems:
            row = second[seed]
            raise DataError(f"{row.cell}, {row.arm}, {row.suite}: not the problems of the reference; collect again")
    num_samples = first[seeds[0]].num_samples
    before, after = (_accuracies([side[seed] for seed in seeds]) for side in (first, second))
    return seeded_difference(before, after, num_samples, confidence), seeds


def _accuracies(rows: Sequence[OutcomeRow]) -> list[list[float]]:
    return [[count / row.num_samples for count in row.correct] for row in rows]

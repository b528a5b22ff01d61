"""The numbers of a grid, a comparison or a study: accuracies, differences from the reference with tests, tuning; JSON.

A study corrects over its planned tests, and one that is missing, or lacks some of its seeds, counts with p = 1; a
comparison corrects over the tests that it has. A study waits for every try before it chooses; a comparison leaves
failed tries out.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from luffy.config.many_runs.sweep_design import ONLY_CELL, GridPoint, SelectConfig, SweepDesign, value_text
from luffy.config.many_runs.sweep_runs import Chosen, Sweep, SweepRun, decoding_of, distinct
from luffy.errors import DataError, LuffyError
from luffy.evaluation.across_runs.run_results import (
    BASE,
    REPORTED,
    TRIED,
    ArmResults,
    Costs,
    RunOutcome,
    SweepResults,
    arm_results,
    base_rows,
    costs_together,
    in_order,
    read_run,
    run_rows,
    together,
)
from luffy.evaluation.results import Cell, CheckpointScores, read_scores
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace
from luffy.statistics.accuracy import Estimate
from luffy.statistics.over_seeds import SeededDifference, seeded_accuracy, seeded_difference
from luffy.statistics.paired import holm

Verdict = Literal["ahead", "behind", "not distinguishable"]
Measured = tuple[str, str, Cell]
"""Cell of the design, arm ("": the base), and suite with decoding."""
Contrast = tuple[str, str, str, Cell]
"""Cell of the design, arm, the arm that it is compared with, and suite with decoding."""
_UNTUNED = "no point of its grid has finished with every seed of select.seeds"


@dataclass(frozen=True, slots=True)
class Score:
    """Accuracy over seeds and problems."""

    estimate: Estimate
    by_seed: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Effect:
    """An arm minus another, in one cell on one suite under one decoding."""

    result: SeededDifference
    seeds: tuple[int, ...]
    """Seeds that both have."""
    adjusted_p: float | None
    """After Holm's correction over the planned tests, or all tests of a comparison; None: exploratory."""
    confidence: float

    @property
    def is_planned(self) -> bool:
        return self.adjusted_p is not None

    @property
    def p_value(self) -> float:
        """The corrected p-value of a planned test, else the uncorrected one."""
        return self.result.p_value if self.adjusted_p is None else self.adjusted_p

    @property
    def is_significant(self) -> bool:
        return self.p_value < 1 - self.confidence

    @property
    def verdict(self) -> Verdict:
        if not self.is_significant:
            return "not distinguishable"
        return "ahead" if self.result.difference.value > 0 else "behind"


@dataclass(frozen=True, slots=True)
class Try:
    """One arm at one point of its grid."""

    results: ArmResults
    score: Score | None
    """None where a seed has failed: a mean over fewer seeds would not be comparable."""

    @property
    def point(self) -> GridPoint:
        return self.results.point


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
        if (chosen := self.chosen) is None:
            return []
        accuracies = [each.score.estimate.value for each in self.tries if each.score is not None]
        if len(accuracies) > 1 and len(set(accuracies)) == 1:
            return [f"{self.arm}: all tried points are equally accurate; the first was chosen"]
        lines = []
        for key, value in chosen.point.values:
            there = [dict(each.point.values)[key] for each in self.tries]
            numbers = [each for each in there if isinstance(each, int | float) and not isinstance(each, bool)]
            if len(numbers) == len(there) and min(numbers) < max(numbers) and value in (min(numbers), max(numbers)):
                side, more = ("smallest", "smaller") if value == min(numbers) else ("largest", "larger")
                text = value_text(value)
                lines.append(f"{self.arm}: {key}={text} was chosen, the {side} value tried; a {more} one may be better")
        return lines

    @property
    def costs(self) -> Costs:
        """What all finished tries have spent together; a stage that several of them share is counted once."""
        return costs_together([seed for each in self.tries for seed in each.results.seeds])


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tuning of every arm in one cell, each with equally many tries."""

    select: SelectConfig
    decoding: str
    arms: tuple[ArmTuning, ...]

    @property
    def num_tries(self) -> int:
        return len(self.arms[0].tries)

    def chosen(self, arm: str) -> Try | None:
        return next(each.chosen for each in self.arms if each.arm == arm)

    @property
    def warnings(self) -> list[str]:
        return [line for arm in self.arms for line in arm.warnings]

    @property
    def failures(self) -> list[str]:
        return [
            f"{arm.arm}, {each.point.text}, seed {seed}: {reason}"
            for arm in self.arms
            for each in arm.tries
            for seed, reason in each.results.failures.items()
        ]


@dataclass(frozen=True, slots=True)
class Findings:
    """All numbers of a design."""

    design: SweepDesign
    confidence: float
    measured: tuple[Cell, ...]
    """Suites by decoding; the primary one of a study first."""
    scores: Mapping[Measured, Score]
    effects: Mapping[Contrast, Effect]
    repeated_over: str = "seeds"
    """What the reported runs of an arm differ in: seeds, or bases."""
    arms: tuple[ArmResults, ...] = ()
    """The arms of a comparison, the points of a grid; a study's results hold no more than rows."""
    tuning: Tuning | None = None
    """None: nothing was tuned, or elsewhere."""

    @property
    def decodings(self) -> list[str]:
        return list(dict.fromkeys(decoding for _, decoding in self.measured))

    def suites(self, decoding: str) -> list[str]:
        return [suite for suite, how in self.measured if how == decoding]

    def score(self, arm: str, measured: Cell, cell: str = ONLY_CELL) -> Score | None:
        """The one of an arm ("": the base), or of a grid's point by its text."""
        return self.scores.get((cell, arm, measured))

    def scores_of(self, arm: str) -> list[tuple[Cell, Score]]:
        """Those of an arm or a point that are known, by suite and decoding."""
        return [(on, found) for on in self.measured if (found := self.score(arm, on)) is not None]

    def effect(self, cell: str, arm: str, measured: Cell | None = None, against: str | None = None) -> Effect | None:
        """On the primary measure and against the reference, unless others are given."""
        return self.effects.get((cell, arm, against or self.design.reference, measured or self.measured[0]))

    @property
    def missing(self) -> list[tuple[str, str, str]]:
        """Planned tests that the results do not have yet, or not with every seed."""
        effects = {each: self.effect(each[0], each[1], against=each[2]) for each in self.design.planned}
        return [each for each, effect in effects.items() if effect is None or not effect.is_planned]

    @property
    def failures(self) -> list[str]:
        tuning = self.tuning.failures if self.tuning is not None else []
        return tuning + [
            f"{arm.name}, seed {seed}: {reason}" for arm in self.arms for seed, reason in arm.failures.items()
        ]

    @property
    def off_budget(self) -> list[str]:
        """One line for each arm that missed the budget.

        SFT steps between those of RL add optimizer steps; a step whose groups were all filtered out takes none.
        """
        budget = self.design.budget
        spent = {arm.name: arm.costs.optimizer_steps for arm in self.arms if arm.costs is not None}
        return [
            f"{name}: {steps:g} optimizer steps a seed where the budget is {budget.optimizer_steps}"
            for name, steps in spent.items()
            if budget is not None and steps not in (None, budget.optimizer_steps)
        ]


def find(
    sweep: Sweep, results: SweepResults, arms: Sequence[ArmResults] = (), tuning: Tuning | None = None
) -> Findings:
    """The findings on the reported rows of `results`; DataError where arms were evaluated on different problems."""
    design, confidence = sweep.design, confidence_of(sweep)
    rows: dict[Measured, pd.DataFrame] = {}
    outcomes = results.where(role=(REPORTED, BASE)).outcomes
    for place, found in outcomes.groupby(["cell", "arm", "suite", "decoding"], sort=False):
        cell, arm, suite, decoding = map(str, place)
        rows[cell, arm, (suite, decoding)] = found
    primary = [] if design.primary is None else [(design.primary.suite, design.primary.decoding)]
    measured = tuple(dict.fromkeys([*primary, *(place[2] for place in rows)]))
    order = {name: number for number, name in enumerate(sweep.cells)}
    places = sorted((place for place in rows if place[0] in order), key=lambda place: order[place[0]])
    pairs = dict.fromkeys([*((arm, design.reference) for arm in design.others), *(each[1:] for each in design.planned)])
    raw = {
        (cell, arm, against, on): difference
        for cell, arm, on in places
        for against in (other for mine, other in pairs if mine == arm)
        if (difference := _difference(rows.get((cell, against, on)), rows[cell, arm, on], confidence))
    }
    # Missing runs of a study make no other test more significant, and none counts before it has every seed.
    family = [(*each, measured[0]) for each in design.planned] if design.cells else list(raw)
    counts = {
        each: not design.cells or (each in raw and len(raw[each][1]) == len(sweep.seeds(each[0]))) for each in family
    }
    adjusted = holm([raw[each][0].p_value if counts[each] else 1.0 for each in family])
    p_values = {each: p for each, p in zip(family, adjusted, strict=True) if counts[each]}
    return Findings(
        design=design,
        confidence=confidence,
        measured=measured,
        scores={place: score(rows[place], confidence) for place in places},
        effects={
            place: Effect(result, seeds, p_values.get(place), confidence) for place, (result, seeds) in raw.items()
        },
        repeated_over=sweep.repeated_over,
        arms=tuple(arms),
        tuning=tuning,
    )


def find_on_arms(
    sweep: Sweep, arms: Sequence[ArmResults], base: CheckpointScores | None, tuning: Tuning | None = None
) -> Findings:
    """The findings on the arms of a comparison and the policy that all start from, or on the points of a grid."""
    parts = [] if base is None else [base_rows(ONLY_CELL, base)]
    parts += [run_rows(ONLY_CELL, REPORTED, arm.name, arm.point, seed) for arm in arms for seed in arm.seeds]
    return find(sweep, together(parts), arms, tuning)


def confidence_of(sweep: Sweep) -> float:
    """Level of the intervals and tests."""
    evaluation = sweep.candidates()[0].config.evaluation
    assert evaluation is not None
    return evaluation.confidence


def score(rows: pd.DataFrame, confidence: float) -> Score:
    """The score over the seeds of `rows`, outcomes of one arm; DataError where their problems are not the same."""
    _check_same_problems(rows)
    columns = rows["seed"], rows["num_samples"], rows["correct"]
    by_seed = {seed: sum(correct) / (k * len(correct)) for seed, k, correct in zip(*columns, strict=True)}
    return Score(seeded_accuracy([*rows["correct"]], int(rows["num_samples"].iloc[0]), confidence), by_seed)


def tuning_of(sweep: Sweep, cell: str, outcomes: Mapping[str, RunOutcome]) -> Tuning:
    """What the tuning runs in `cell` of a design with `select` found; `outcomes` by `SweepRun.folder`."""
    select = sweep.design.select
    assert select is not None
    decoding, confidence = decoding_of(sweep.candidates(cell)[0].config, select), confidence_of(sweep)
    runs, tries = sweep.tuning_runs([cell]), dict[str, list[Try]]()
    for arm, point in ((each.arm, each.point) for each in sweep.candidates(cell)):
        own = {run.seed: outcomes[run.folder] for run in runs if (run.arm, run.point) == (arm, point)}
        found = arm_results(arm, point, own)
        rows = together(run_rows(cell, TRIED, arm, point, result) for result in found.seeds)
        on = rows.where(suite=[select.on], decoding=[decoding]).outcomes
        tries.setdefault(arm, []).append(Try(found, None if found.failures else score(on, confidence)))
    arms = tuple(ArmTuning(arm, tuple(of_arm)) for arm, of_arm in tries.items())
    return Tuning(select, decoding, arms)


def choose(tuning: Tuning, *, strict: bool) -> dict[str, int]:
    """Number of each arm's chosen point; an arm for which nothing can be chosen is missing.

    `strict`: so is an arm with an unfinished try, for a study, which several machines share.
    """
    return {
        each.arm: best.point.number
        for each in tuning.arms
        if (best := each.chosen) is not None and not (strict and any(one.results.failures for one in each.tries))
    }


def arms_of(sweep: Sweep, runs: Sequence[SweepRun], outcomes: Mapping[str, RunOutcome]) -> list[ArmResults]:
    """Every arm with its reported seeds, all of them failed where nothing could be chosen for it."""
    found = []
    for name in dict.fromkeys(each.arm for each in sweep.candidates()):
        own = {run.seed: run for run in runs if run.arm == name}
        point = next(iter(own.values())).point if own else sweep.candidates_of(name)[0].point
        unmade = dict.fromkeys(sweep.design.seeds, LuffyError(_UNTUNED))
        found.append(arm_results(name, point, unmade | {seed: outcomes[run.folder] for seed, run in own.items()}))
    return found


def findings_json(findings: Findings) -> str:
    """All findings of a comparison or a grid as JSON, for other programs."""
    design, arms = findings.design, [_arm_values(findings, arm) for arm in findings.arms]
    content: dict[str, Any] = {"name": design.name}
    if design.budget is None:
        content |= {"grid": design.grid, "seeds": design.seeds, "points": arms}
    else:
        content |= {
            "budget": design.budget.text,
            "off_budget": findings.off_budget,
            "reference": design.reference,
            "seeds": design.seeds,
            "confidence": findings.confidence,
            "base": [_values(on, found.estimate) for on, found in findings.scores_of("")],
            "arms": arms,
            "tuning": None if findings.tuning is None else _tuning_values(findings.tuning),
        }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _difference(
    reference: pd.DataFrame | None, arm: pd.DataFrame, confidence: float
) -> tuple[SeededDifference, tuple[int, ...]] | None:
    """The difference over the seeds that both have, and these seeds; None without any."""
    if reference is None or not (seeds := [seed for seed in reference["seed"] if seed in {*arm["seed"]}]):
        return None
    both = [rows.set_index("seed", drop=False).loc[seeds] for rows in (reference, arm)]
    _check_same_problems(pd.concat(both))
    before, after = (
        [[count / k for count in correct] for k, correct in zip(rows["num_samples"], rows["correct"], strict=True)]
        for rows in both
    )
    return seeded_difference(before, after, int(both[0]["num_samples"].iloc[0]), confidence), tuple(seeds)


def _check_same_problems(rows: pd.DataFrame) -> None:
    first, differing = rows.iloc[0], rows[rows["problems"] != rows["problems"].iloc[0]]
    for _, row in differing.iterrows():
        where = f"{row['cell']}, {row['arm']}, {row['suite']}, seed {row['seed']}"
        raise DataError(f"{where}: not the problems of {first['arm']}, seed {first['seed']}; make its results again")


def _values(on: Cell, found: Estimate) -> dict[str, Any]:
    return {"suite": on[0], "decoding": on[1], **asdict(found)}


def _arm_values(findings: Findings, arm: ArmResults) -> dict[str, Any]:
    scores, recipe = findings.scores_of(arm.name), findings.design.arms.get(arm.name)
    values = {
        "finished_seeds": [seed.seed for seed in arm.seeds],
        "failures": dict(arm.failures),
        "accuracy": [{**_values(on, found.estimate), "by_seed": found.by_seed} for on, found in scores],
        "cost_a_seed": asdict(arm.costs) if arm.costs is not None else None,
    }
    if recipe is None:
        return {"values": dict(arm.point.values), **values}
    return {
        "arm": arm.name,
        "chain": recipe.chain,
        "method": recipe.method,
        **values,
        "minus_reference": [
            {
                **_values(on, found.result.difference),
                "p": found.result.p_value,
                "p_holm": found.adjusted_p,
                "significant": found.is_significant,
                "by_seed": dict(zip(found.seeds, found.result.by_seed, strict=True)),
            }
            for on in findings.measured
            if (found := findings.effect(ONLY_CELL, arm.name, on)) is not None
        ],
        "curve": [asdict(point) for point in arm.curve],
        "held_out": {
            suite: [asdict(point) for point in arm.held_out_mean(suite, findings.confidence)] for suite in arm.held_out
        },
    }


def _tuning_values(tuning: Tuning) -> dict[str, Any]:
    def tried(each: Try) -> dict[str, Any]:
        score, accuracy = each.score, None
        if score is not None:
            value, (low, high) = score.estimate.value, score.estimate.interval
            accuracy = {"value": value, "low": low, "high": high, "by_seed": score.by_seed}
        return {"values": dict(each.point.values), "accuracy": accuracy, "failures": dict(each.results.failures)}

    return {
        "on": tuning.select.on,
        "decoding": tuning.decoding,
        "seeds": tuning.select.seeds,
        "warnings": tuning.warnings,
        "arms": [
            {
                "arm": arm.arm,
                "tries": list(map(tried, arm.tries)),
                "chosen": dict(arm.chosen.point.values) if arm.chosen is not None else None,
                "cost": asdict(arm.costs),
            }
            for arm in tuning.arms
        ],
    }


class SweepProgress:
    """The finished runs of a study in one workspace. Lookups are cached; `forget` drops those of unfinished runs."""

    def __init__(self, sweep: Sweep, workspace: Workspace, *, verify: bool = False) -> None:
        self.sweep = sweep
        self._workspace = workspace
        self._verify = verify
        self._finished: dict[str, dict[str, Path] | None] = {}

    def forget(self) -> None:
        self._finished = {key: found for key, found in self._finished.items() if found is not None}

    def finished(self, run: SweepRun) -> dict[str, Path] | None:
        """Directories of the run's stages by name if all of them are finished, else None."""
        if run.made_as in self._finished:
            return self._finished[run.made_as]
        experiment = open_experiment(run.config, self._workspace, verify=self._verify)
        plans = (experiment.plan_node(node.name) for node in experiment.nodes if node.name in run.nodes)
        # Where one is unfinished, what comes after it cannot be finished either.
        made = {plan.node.name: plan.directory for plan in takewhile(lambda plan: plan.action == "reuse", plans)}
        self._finished[run.made_as] = found = made if made.keys() == {*run.nodes} else None
        return found

    def left(self, runs: Iterable[SweepRun]) -> list[SweepRun]:
        """The unfinished runs, without duplicates."""
        return [run for run in distinct(runs) if self.finished(run) is None]

    def chosen(self, cells: Sequence[str]) -> Chosen:
        """The chosen point of each arm whose tuning runs are all finished."""
        runs = self.sweep.tuning_runs(cells)
        outcomes: dict[str, RunOutcome] = {
            run.folder: LuffyError("not finished") if (stages := self.finished(run)) is None else read_run(run, stages)
            for run in runs
        }
        tuned = dict.fromkeys(run.cell for run in runs)
        return {cell: choose(tuning_of(self.sweep, cell, outcomes), strict=True) for cell in tuned}

    def collect(self, runs: Iterable[SweepRun]) -> SweepResults:
        """The rows of those of `runs` that are finished, and of the bases of their cells."""
        parts, bases = list[SweepResults](), set[tuple[str, int]]()
        for run in runs:
            if (stages := self.finished(run)) is None:
                continue
            role = TRIED if run.is_try else REPORTED
            parts.append(run_rows(run.cell, role, run.arm, run.point, read_run(run, stages)))
            base = run.cell, run.seed if self.sweep.repeated_over == "bases" else 0
            if not run.is_try and base not in bases:
                bases.add(base)
                parts.append(base_rows(run.cell, read_scores(stages["evaluate_base"]), base[1]))
        return in_order(together(parts))

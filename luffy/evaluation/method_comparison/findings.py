"""The numbers of a comparison: accuracy of each arm, its difference from the reference, tests; also as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from luffy.config.many_runs.comparison_config import BudgetConfig
from luffy.evaluation.checkpoint_scores import CheckpointScores
from luffy.evaluation.method_comparison.arms import Arm
from luffy.evaluation.method_comparison.seed_scores import Score, correct_by_problem, num_samples, score
from luffy.evaluation.method_comparison.tuning import Tuning, tuning_values
from luffy.evaluation.results import Cell
from luffy.statistics.accuracy import Estimate
from luffy.statistics.over_seeds import SeededDifference, seeded_difference
from luffy.statistics.paired import holm

_TOKENS_OFF = 0.05
"""Relative deviation from a budget of tokens that is not reported: a stage ends with a whole step."""


@dataclass(frozen=True, slots=True)
class SignificanceTest:
    """An arm against the reference on one suite under one decoding."""

    result: SeededDifference
    seeds: tuple[int, ...]
    """Seeds that both arms have finished."""
    adjusted_p: float
    """After Holm's correction over all tests of the comparison."""
    is_significant: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """All numbers of a comparison."""

    name: str
    budget: BudgetConfig
    reference: str
    seeds: tuple[int, ...]
    confidence: float
    cells: tuple[Cell, ...]
    """Suites by decoding, as they were evaluated."""
    arms: tuple[Arm, ...]
    base: Mapping[Cell, Estimate]
    """The policy that all arms start from; intervals are over problems."""
    scores: Mapping[tuple[str, Cell], Score]
    """By arm; those without a finished seed are missing."""
    tests: Mapping[tuple[str, Cell], SignificanceTest]
    tuning: Tuning | None = None
    """None: nothing was tuned."""

    @property
    def decodings(self) -> list[str]:
        return list(dict.fromkeys(decoding for _, decoding in self.cells))

    def suites(self, decoding: str) -> list[str]:
        return [suite for suite, how in self.cells if how == decoding]

    @property
    def failures(self) -> list[str]:
        """One line per failed run, those of tuning first."""
        tuning = self.tuning.failures if self.tuning is not None else []
        return tuning + [
            f"{arm.name}, seed {seed}: {reason}" for arm in self.arms for seed, reason in arm.failures.items()
        ]

    @property
    def off_budget(self) -> list[str]:
        """One line for each arm that missed the budget.

        SFT steps between those of RL add optimizer steps; a step whose groups were all filtered out takes none. The
        number of tokens is lower where `max_optimizer_steps` came first, and higher where a single step takes many.
        """
        costs = {arm.name: arm.costs for arm in self.arms if arm.costs is not None}
        if (tokens := self.budget.tokens) is not None:
            spent = {name: each.tokens for name, each in costs.items()}
            return [
                f"{name}: {made:,.0f} tokens a seed where the budget is {tokens:,}"
                for name, made in spent.items()
                if made is not None and abs(made / tokens - 1) > _TOKENS_OFF
            ]
        wanted = self.budget.optimizer_steps
        return [
            f"{name}: {each.optimizer_steps:g} optimizer steps a seed where the budget is {wanted}"
            for name, each in costs.items()
            if wanted is not None and each.optimizer_steps is not None and each.optimizer_steps != wanted
        ]


def find(
    name: str,
    budget: BudgetConfig,
    reference: str,
    seeds: Sequence[int],
    base: CheckpointScores,
    arms: Sequence[Arm],
    tuning: Tuning | None = None,
) -> Findings:
    """The findings on `arms`, in their order. Raises LuffyError where arms were evaluated on different problems."""
    confidence = base.results.confidence
    cells = tuple((row.suite, row.decoding) for row in base.results.rows)
    scores = {(arm.name, cell): score(arm.seeds, cell, confidence) for arm in arms if arm.seeds for cell in cells}
    reference_arm = next(arm for arm in arms if arm.name == reference)
    tests = {
        (arm.name, cell): found
        for arm in arms
        if arm.name != reference
        for cell in cells
        if (found := _difference(reference_arm, arm, cell, confidence)) is not None
    }
    adjusted = holm([result.p_value for result, _ in tests.values()])
    return Findings(
        name=name,
        budget=budget,
        reference=reference,
        seeds=tuple(seeds),
        confidence=confidence,
        cells=cells,
        arms=tuple(arms),
        base={cell: _base(base, cell) for cell in cells},
        scores=scores,
        tests={
            key: SignificanceTest(result, used, p, p < 1 - confidence)
            for (key, (result, used)), p in zip(tests.items(), adjusted, strict=True)
        },
        tuning=tuning,
    )


def as_json(findings: Findings) -> str:
    """All findings as JSON, for other programs."""
    content = {
        "name": findings.name,
        "budget": findings.budget.text,
        "off_budget": findings.off_budget,
        "reference": findings.reference,
        "seeds": findings.seeds,
        "confidence": findings.confidence,
        "base": [{**_cell(cell), **asdict(estimate)} for cell, estimate in findings.base.items()],
        "arms": [_arm(findings, arm) for arm in findings.arms],
        "tuning": tuning_values(findings.tuning) if findings.tuning is not None else None,
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _arm(findings: Findings, arm: Arm) -> dict[str, Any]:
    scores = {cell: findings.scores[arm.name, cell] for cell in findings.cells if (arm.name, cell) in findings.scores}
    tests = {cell: findings.tests[arm.name, cell] for cell in findings.cells if (arm.name, cell) in findings.tests}
    return {
        "arm": arm.name,
        "chain": arm.chain,
        "method": arm.method,
        "finished_seeds": [seed.seed for seed in arm.seeds],
        "failures": dict(arm.failures),
        "accuracy": [
            {**_cell(cell), **asdict(score.estimate), "by_seed": score.by_seed} for cell, score in scores.items()
        ],
        "minus_reference": [
            {
                **_cell(cell),
                **asdict(test.result.difference),
                "p": test.result.p_value,
                "p_holm": test.adjusted_p,
                "significant": test.is_significant,
                "by_seed": dict(zip(test.seeds, test.result.by_seed, strict=True)),
            }
            for cell, test in tests.items()
        ],
        "cost_a_seed": arm.costs.values() if arm.costs is not None else None,
        "curve": [asdict(point) for point in arm.curve],
        "held_out": {
            suite: [asdict(point) for point in arm.held_out_mean(suite, findings.confidence)] for suite in arm.held_out
        },
    }


def _cell(cell: Cell) -> dict[str, str]:
    return {"suite": cell[0], "decoding": cell[1]}


def _base(base: CheckpointScores, cell: Cell) -> Estimate:
    row = base.row(cell)
    assert row is not None
    return Estimate(row.accuracy, *row.interval, row.method, row.num_problems)


def _difference(
    reference: Arm, arm: Arm, cell: Cell, confidence: float
) -> tuple[SeededDifference, tuple[int, ...]] | None:
    """The difference over the seeds that both have finished, and these seeds; None without any."""
    first, second = ({seed.seed: seed for seed in one.seeds} for one in (reference, arm))
    shared = tuple(seed for seed in first if seed in second)
    if not shared:
        return None
    k, uids = num_samples(first[shared[0]].evaluation, cell), list(first[shared[0]].evaluation.correct[cell])
    before, after = (
        [[correct_by_problem(side[seed], cell, uids)[uid] / k for uid in uids] for seed in shared]
        for side in (first, second)
    )
    return seeded_difference(before, after, k, confidence), shared

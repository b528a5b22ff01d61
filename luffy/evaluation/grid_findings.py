"""Results of a grid: accuracies over seeds and problems, and costs, of every point."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from luffy.config.many_runs.grid import GridPoint
from luffy.config.many_runs.grid_experiment import GridConfig
from luffy.evaluation.method_comparison.arms import Costs, FinishedSeed, mean_costs
from luffy.evaluation.method_comparison.seed_scores import Score, score
from luffy.evaluation.results import Cell


@dataclass(frozen=True, slots=True)
class PointResult:
    """One point of the grid."""

    point: GridPoint
    seeds: tuple[FinishedSeed, ...]
    failures: Mapping[int, str]
    """Seed to one line."""

    @property
    def costs(self) -> Costs | None:
        """Means over its seeds; None where none is finished."""
        return mean_costs(self.seeds)

    def score(self, cell: Cell) -> Score | None:
        """Score on a suite under a decoding; None without a finished seed, or where it was not evaluated."""
        known = [seed for seed in self.seeds if seed.evaluation.row(cell) is not None]
        return score(known, cell, known[0].evaluation.results.confidence) if known else None


@dataclass(frozen=True, slots=True)
class GridFindings:
    """All numbers of a grid."""

    config: GridConfig
    results: tuple[PointResult, ...]
    """In the order of the grid."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Suites by decoding, as the points evaluated them."""
        rows = (row for each in self.results for seed in each.seeds for row in seed.evaluation.results.rows)
        return tuple(dict.fromkeys((row.suite, row.decoding) for row in rows))

    @property
    def decodings(self) -> list[str]:
        return list(dict.fromkeys(decoding for _, decoding in self.cells))

    def suites(self, decoding: str) -> list[str]:
        """The suites that were evaluated under a decoding."""
        return [suite for suite, how in self.cells if how == decoding]

    @property
    def failures(self) -> list[str]:
        """One line per failed run."""
        return [
            f"{each.point.text}, seed {seed}: {reason}"
            for each in self.results
            for seed, reason in each.failures.items()
        ]


def grid_json(findings: GridFindings) -> str:
    """All findings as JSON, for other programs."""
    content = {
        "name": findings.config.name,
        "grid": findings.config.grid,
        "seeds": findings.config.seeds,
        "points": [_point(each, findings.cells) for each in findings.results],
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _point(each: PointResult, cells: Sequence[Cell]) -> dict[str, Any]:
    costs = each.costs
    scores = {cell: found for cell in cells if (found := each.score(cell)) is not None}
    return {
        "values": dict(each.point.values),
        "finished_seeds": [seed.seed for seed in each.seeds],
        "failures": dict(each.failures),
        "accuracy": [
            {"suite": suite, "decoding": decoding, **asdict(found.estimate), "by_seed": found.by_seed}
            for (suite, decoding), found in scores.items()
        ],
        "cost_a_seed": costs.values() if costs is not None else None,
    }

"""The accuracies of finished evaluations, for tables."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from luffy.report.cells import accuracy
from luffy.statistics.accuracy import Estimate

RESULTS_FILE = "results.json"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One cell of the result table."""

    checkpoint: str
    suite: str
    decoding: str
    accuracy: float
    interval: tuple[float, float]

    @property
    def text(self) -> str:
        """In percent, with its interval."""
        return accuracy(Estimate(self.accuracy, *self.interval, "", 0)).plain


def read_accuracies(directories: Iterable[Path]) -> list[Accuracy]:
    """The contents of `results.json` in each of `directories` (finished `evaluate` stages)."""
    found = []
    for directory in directories:
        results = json.loads((directory / RESULTS_FILE).read_text(encoding="utf-8"))
        for row in results["rows"]:
            low, high = row["interval"]
            cell = Accuracy(results["checkpoint"], row["suite"], row["decoding"], row["accuracy"], (low, high))
            found.append(cell)
    return found


def by_suite(accuracies: Iterable[Accuracy]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: one row per suite and decoding, one column per checkpoint."""
    cells = list(accuracies)
    checkpoints = list(dict.fromkeys(cell.checkpoint for cell in cells))
    texts = {(cell.decoding, cell.suite, cell.checkpoint): cell.text for cell in cells}
    kinds = sorted(dict.fromkeys((cell.decoding, cell.suite) for cell in cells), key=lambda kind: _order(kind, cells))
    rows = [
        [suite, decoding, *(texts.get((decoding, suite, name), "-") for name in checkpoints)]
        for decoding, suite in kinds
    ]
    return ["suite", "decoding", *checkpoints], rows


def _order(kind: tuple[str, str], cells: list[Accuracy]) -> tuple[int, int]:
    """By decoding, then by suite, each in the order of the configuration."""
    decodings = list(dict.fromkeys(cell.decoding for cell in cells))
    suites = list(dict.fromkeys(cell.suite for cell in cells))
    return decodings.index(kind[0]), suites.index(kind[1])

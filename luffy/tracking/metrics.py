"""`metrics.jsonl`: one flat object per step, for people, plots and the comparison of runs.

    {"step": 12, "actor/loss": -0.013, "reward/mean": 0.44, "perf/tokens_per_s": 9120.5}

Everything that depends on time is in the namespace `perf`, so that two runs of the same experiment agree bit for bit in
all other namespaces.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from luffy.tracking.jsonl import Json, StepLines, read_lines

METRICS_FILE = "metrics.jsonl"
NAMESPACES = ("actor", "critic", "batch", "rollout", "reward", "val", "perf")
"""The policy, its critic (PPO), the training batch, sampling, rewards, validation, and time."""
TIME_NAMESPACE = "perf"

MetricRow = dict[str, float]
"""A line of the file: `step` (a whole number) and the metrics of that step."""


class MetricsWriter:
    """Appends to `metrics.jsonl`; when `write` returns, the line has been handed to the operating system."""

    def __init__(self, path: Path) -> None:
        self._lines = StepLines(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of `step`; a value that is not finite is written as null."""
        check_names(metrics)
        values = {name: _finite(float(value)) for name, value in metrics.items()}
        self._lines.append({"step": step, **values})

    def truncate(self, after_step: int) -> None:
        """Drop the steps after `after_step`: a run that resumes there writes them again."""
        self._lines.truncate(after_step)

    def close(self) -> None:
        self._lines.close()


def read_metrics(path: Path) -> list[MetricRow]:
    """The lines of a metrics file in order, null as NaN; empty where there is no file."""
    return [{name: _number(value) for name, value in line.items()} for line in read_lines(path)]


def metrics_until(path: Path, step: int) -> list[MetricRow]:
    """The rows up to `step`, that of a checkpoint; none at 0, where a stage begins anew."""
    return [row for row in read_metrics(path) if row["step"] <= step] if step else []


def training_rows(rows: Iterable[MetricRow]) -> list[MetricRow]:
    """The rows of steps that trained: all but step 0, which only a validation has."""
    return [row for row in rows if row["step"] > 0]


def without_times(row: Mapping[str, float]) -> MetricRow:
    """The metrics outside `perf/`, which are equal in two runs of one experiment."""
    return {name: value for name, value in row.items() if not name.startswith(f"{TIME_NAMESPACE}/")}


def check_names(metrics: Mapping[str, float]) -> None:
    """Assert that every name is in a namespace: readers would not find the curve otherwise."""
    for name in metrics:
        namespace, slash, rest = name.partition("/")
        assert namespace in NAMESPACES and slash and rest, f"metric {name!r} is in none of {NAMESPACES}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: Json) -> float:
    if value is None:
        return math.nan
    assert isinstance(value, int | float)
    return value

"""`metrics.jsonl`: one flat object per step, for people, plots and the comparison of runs; and what its rows add up to.

    {"step": 12, "actor/loss": -0.013, "reward/mean": 0.44, "perf/tokens_per_s": 9120.5}

Everything that depends on time is in the namespace `perf`, so that two runs of the same experiment agree bit for bit in
all other namespaces. Files of JSON lines (`StepLines`) have a `step` in each line: they are appended to during a run,
and truncated when it resumes.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from luffy.files import LineAppender, replacing
from luffy.json_text import parse_json

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
MetricRow = dict[str, float]
"""A line of the file: `step` (a whole number) and the metrics of that step."""
METRICS_FILE = "metrics.jsonl"
NAMESPACES = ("actor", "critic", "batch", "rollout", "reward", "val", "perf")
"""The policy, its critic (PPO), the training batch, sampling, rewards, validation, and time."""
TIME_NAMESPACE = "perf"
GPU_HOURS = "perf/gpu_hours"
_SECONDS_AN_HOUR = 3600.0
_START, _END = "val/", "/accuracy"


class StepLines:
    """Appends to `path`; a killed process, or a full disk, leaves at most one torn line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = LineAppender(path)

    def append(self, line: Mapping[str, Json]) -> None:
        """Write one object; when this returns, it survives the death of this process."""
        # Strict JSON: the caller has to replace values that are not finite.
        text = json.dumps(line, ensure_ascii=False, allow_nan=False)
        self._file.append(text.encode("utf-8", errors="replace"))

    def truncate(self, after_step: int) -> None:
        """Drop torn lines and those of later steps, which the run is about to write again."""
        self._file.close()
        kept = [line for line, values in _parsed_lines(self._path) if cast(int, values["step"]) <= after_step]
        with replacing(self._path) as file:
            file.write(b"".join(kept))
        self._file = LineAppender(self._path)

    def close(self) -> None:
        """Make everything durable and close the file."""
        if not self._file.is_closed:
            self._file.sync()
            self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Json]]:
    """Yield the objects of a file in order; torn lines are skipped, and a missing file is empty."""
    for _, values in _parsed_lines(path):
        yield values


def read_last_lines(path: Path, num_bytes: int) -> list[dict[str, Json]]:
    """The objects in the last `num_bytes` of a file, in order; none for a missing file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = max(file.seek(0, os.SEEK_END) - num_bytes, 0)
        file.seek(max(start - 1, 0))
        lines = file.read().splitlines(keepends=True)
    whole = lines[1:] if start else lines  # the first one is, or may be, the end of a line that began earlier
    return [values for values in map(_parse, whole) if values is not None]


def _parsed_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Json]]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            values = _parse(line)
            if values is not None:
                yield line, values


def _parse(line: bytes) -> dict[str, Json] | None:
    """The object in `line`; None for a line torn by a kill or a power cut."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = parse_json(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def metric_line(step: int, metrics: Mapping[str, float]) -> dict[str, Json]:
    """The line of `step`; a value that is not finite becomes null.

    Asserts that every name is in a namespace: readers would not find the curve otherwise.
    """
    for name in metrics:
        namespace, slash, rest = name.partition("/")
        assert namespace in NAMESPACES and slash and rest, f"metric {name!r} is in none of {NAMESPACES}"
    return {"step": step, **{name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}}


def read_metrics(path: Path) -> list[MetricRow]:
    """The lines of a metrics file in order, null as NaN; empty where there is no file."""
    rows = []
    for line in read_lines(path):
        row = {name: math.nan if value is None else value for name, value in line.items()}
        assert all(isinstance(value, int | float) for value in row.values())
        rows.append(cast(MetricRow, row))
    return rows


def metrics_until(path: Path, step: int) -> list[MetricRow]:
    """The rows up to `step`, that of a checkpoint; none at 0, where a stage begins anew."""
    return [row for row in read_metrics(path) if row["step"] <= step] if step else []


def training_rows(rows: Iterable[MetricRow]) -> list[MetricRow]:
    """The rows of steps that trained: all but step 0, which only a validation has."""
    return [row for row in rows if row["step"] > 0]


def without_times(row: Mapping[str, float]) -> MetricRow:
    """The metrics outside `perf/`, which are equal in two runs of one experiment."""
    return {name: value for name, value in row.items() if not name.startswith(f"{TIME_NAMESPACE}/")}


class GpuHours:
    """Counts from its creation, and from where the metrics in `out` end.

    Create it before anything else in a stage: loading a model holds the GPUs, too. The steps that a killed attempt lost
    count as well, since their GPUs were in use; only the time after an attempt's last metrics is missing.
    """

    def __init__(self, out: Path) -> None:
        self._began = time.monotonic()
        self._earlier = max((row.get(GPU_HOURS, 0.0) for row in read_metrics(out / METRICS_FILE)), default=0.0)

    def metrics(self, num_gpus: int) -> dict[str, float]:
        """`perf/gpu_hours` with that many GPUs held all the time; empty without GPUs.

        There is no such metric for CPUs: a stage does not hold their cores alone.
        """
        if not num_gpus:
            return {}
        elapsed = time.monotonic() - self._began
        return {GPU_HOURS: self._earlier + num_gpus * elapsed / _SECONDS_AN_HOUR}


@dataclass(frozen=True, slots=True)
class HeldOutPoint:
    """Accuracy on one suite, and what training had spent by then."""

    accuracy: float
    low: float
    high: float
    """Bounds of the interval over problems."""
    steps: float
    """Optimizer steps."""
    samples: float
    """Rows that were learned from: rollouts and traces."""
    seconds: float
    """Time in training steps; measuring does not count."""


def with_spent(stages: Iterable[Sequence[MetricRow]]) -> Iterator[tuple[MetricRow, tuple[float, float, float]]]:
    """Each row with what had been spent by then, over stages one after the other: `steps`, `samples` and `seconds`, as
    in `HeldOutPoint`."""
    steps = samples = seconds = 0.0
    for row in (row for rows in stages for row in rows):
        if training_rows([row]):
            # An optimizer step each in SFT, which does not count them.
            steps += row.get("batch/optimizer_steps", 1.0)
            samples += row.get("batch/num_rows", 0.0)
            seconds += row.get("perf/step_s", 0.0)
        yield row, (steps, samples, seconds)


def held_out_curves(stages: Sequence[Sequence[MetricRow]]) -> dict[str, tuple[HeldOutPoint, ...]]:
    """The points of each suite, over the stages of a chain one after the other; empty without validation."""
    points: dict[str, list[HeldOutPoint]] = {}
    for row, spent in with_spent(stages):
        for suite in (name.removeprefix(_START).removesuffix(_END) for name in accuracy_names([row])):
            bounds = row[f"val/{suite}/accuracy_low"], row[f"val/{suite}/accuracy_high"]
            points.setdefault(suite, []).append(HeldOutPoint(row[f"val/{suite}{_END}"], *bounds, *spent))
    return {suite: tuple(found) for suite, found in points.items()}


def accuracy_names(rows: Iterable[MetricRow]) -> list[str]:
    """Names of the metrics of single suites, in order; `val/accuracy` is the mean over them."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if name.startswith(_START) and name.endswith(_END) and name != "val/accuracy"]

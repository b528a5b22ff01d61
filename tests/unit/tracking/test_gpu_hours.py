"""GPU-hours of a stage over all of its attempts."""

import json
from pathlib import Path

import pytest

from luffy.tracking import metrics
from luffy.tracking.metrics import GpuHours


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return now


def test_hours_are_those_of_all_gpus_since_the_start(tmp_path: Path, clock: list[float]) -> None:
    hours = GpuHours(tmp_path)
    clock[0] += 1800
    assert hours.metrics(8) == {"perf/gpu_hours": pytest.approx(4.0)}


def test_a_resumed_stage_goes_on_and_counts_lost_steps(tmp_path: Path, clock: list[float]) -> None:
    rows = [{"step": step, "perf/gpu_hours": 0.5 * step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hours = GpuHours(tmp_path)  # before the tracker drops the steps after the checkpoint
    clock[0] += 3600
    assert hours.metrics(1) == {"perf/gpu_hours": pytest.approx(2.5)}


def test_there_is_no_such_metric_without_gpus(tmp_path: Path) -> None:
    assert GpuHours(tmp_path).metrics(0) == {}

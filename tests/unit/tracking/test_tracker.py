"""Metrics and samples: a resumed run's files equal an undisturbed one's."""

import json
import math
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.config.execution import TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.tracking.metrics import StepLines, metric_line, read_metrics, without_times
from luffy.tracking.tracker import SampleRollout, Tracker, read_samples


def opened(out: Path, resumed_from: int = 0) -> Tracker:
    return Tracker(out, "abc123", {"stage": "rl"}, TrackingConfig(), GradingConfig(), resumed_from)


def rollout(step: int) -> SampleRollout:
    return SampleRollout("u", "1 +1", f"ansẅer {step}\u2028\n", "on_policy", 1.0, "correct", 0.5)


def train(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.log(step, {"actor/loss": 1 / step, "reward/mean": step / 7})
        if step % 2 == 0:
            tracker.samples(step, [rollout(step)])


def test_a_step_that_the_disk_takes_half_of_is_an_error_and_the_next_ones_can_be_read(tmp_path: Path) -> None:
    path, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = StepLines(path)
    writer.append(metric_line(1, {"actor/loss": 0.5}))
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.append(metric_line(2, {"actor/loss": 0.5}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for step in (3, 4):
        writer.append(metric_line(step, {"actor/loss": 0.5}))
    writer.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 3, 4]


def test_a_resumed_run_leaves_the_same_files_as_an_undisturbed_one_and_one_that_starts_anew_none(tmp_path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    with opened(whole) as tracker:
        train(tracker, range(1, 11))
    train(opened(broken), range(1, 8))  # killed after step 7, checkpoint at 4
    with (broken / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "actor/lo')
    with opened(broken, resumed_from=4) as tracker:
        train(tracker, range(5, 11))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes()
    opened(whole).close()
    assert read_metrics(whole / "metrics.jsonl") == [] == list(read_samples(whole / "samples.jsonl"))


def test_what_is_logged_is_in_the_files_at_once_as_strict_json_and_comes_back(tmp_path) -> None:
    """The first line says how long the start took, and only such times are left out of a comparison."""
    tracker = opened(tmp_path)
    tracker.started()
    tracker.log(1, {"actor/loss": 0.5})
    tracker.log(2, {"actor/loss": math.nan, "actor/lr": math.inf})
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["perf/start_s"] > 0
    assert (without_times(first), second) == (
        {"step": 1, "actor/loss": 0.5}, {"step": 2, "actor/loss": None, "actor/lr": None},
    )  # fmt: skip
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[1]["actor/loss"])
    tracker.samples(3, [rollout(1), rollout(2)])
    tracker.close()
    assert list(read_samples(tmp_path / "samples.jsonl")) == [(3, rollout(1)), (3, rollout(2))]
    for name in ("loss", "learner/loss", "actor/", "actor"):  # outside the namespaces
        with pytest.raises(AssertionError, match="none of"):
            opened(tmp_path).log(1, {name: 1.0})


@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5), cut=st.integers(0, 6))
def test_truncating_keeps_exactly_the_steps_up_to_the_cut(values, cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("metrics") / "m.jsonl"
    writer = StepLines(path)
    for step, value in enumerate(values, start=1):
        writer.append(metric_line(step, {"actor/loss": value}))
    writer.truncate(cut)
    assert [row["actor/loss"] for row in read_metrics(path)] == values[:cut]

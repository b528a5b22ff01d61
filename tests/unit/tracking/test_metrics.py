"""What metrics add up to: held-out accuracy over what was spent, tokens, and GPU-hours over all attempts."""

import json
from pathlib import Path

import pytest

from luffy.tracking import metrics
from luffy.tracking.metrics import GpuHours, HeldOutPoint, TokenBudget, held_out_curves, tokens_spent


def measured(step, accuracy, **others):
    values = {"accuracy": accuracy, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
    return {"step": float(step), "val/accuracy": 0.0, **{f"val/a/{name}": value for name, value in values.items()}} | {
        f"{name.replace('__', '/')}": value for name, value in others.items()
    }


def test_points_count_what_all_stages_had_spent():
    sft = [measured(0, 0.1), {"step": 1.0, "batch/num_rows": 4.0, "perf/step_s": 1.0}]
    sft.append(measured(2, 0.2, batch__num_rows=4.0, perf__step_s=1.5))
    rl = [measured(0, 0.2), measured(1, 0.4, batch__optimizer_steps=3.0, batch__num_rows=10.0, perf__step_s=5.0)]
    points = held_out_curves([sft, rl])
    assert list(points) == ["a"]
    spent = [(point.steps, point.samples, point.seconds) for point in points["a"]]
    assert spent == [(0, 0, 0), (2, 8, 2.5), (2, 8, 2.5), (5, 18, 7.5)]
    assert points["a"][-1] == HeldOutPoint(0.4, pytest.approx(0.3), pytest.approx(0.5), 5, 18, 7.5)


def test_there_is_nothing_without_validation():
    assert held_out_curves([[{"step": 1.0, "actor/loss": 0.5}]]) == {}


ROWS = [{"step": 1.0, "rollout/tokens_drawn": 30.0, "batch/response_tokens": 20.0}] * 4


def last_step(limit, resumed_from=0):
    budget = TokenBudget(limit, ROWS[:resumed_from])
    step = resumed_from
    while not budget.is_over and step < len(ROWS):
        budget.count(ROWS[step])
        step += 1
    return step


@pytest.mark.parametrize(("limit", "step"), [(1, 1), (50, 1), (51, 2), (100, 2), (10_000, 4), (None, 4)])
def test_a_stage_ends_with_the_step_that_reaches_the_limit_wherever_it_was_resumed(limit, step):
    assert [last_step(limit, resumed_from) for resumed_from in range(step + 1)] == [step] * (step + 1)


def test_sft_spends_what_it_learns_from_and_rl_also_what_it_samples():
    assert tokens_spent({"batch/response_tokens": 7.0, "perf/step_s": 3.0}) == 7
    assert tokens_spent(ROWS[0]) == 50


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

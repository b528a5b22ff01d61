"""Held-out accuracy over what training had spent."""

import pytest

from luffy.tracking.metrics import HeldOutPoint, held_out_curves


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

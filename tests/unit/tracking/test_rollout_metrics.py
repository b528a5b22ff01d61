"""What a step's groups say."""

import pytest

from luffy.tracking.rollout_metrics import rollout_metrics
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory


def _row(reward: float, length: int = 2, off: bool = False, cut: bool = False) -> Trajectory:
    source = Source.OFF_POLICY if off else Source.ON_POLICY
    outcome = Outcome.CORRECT if reward else Outcome.WRONG
    finish = FinishReason.LENGTH if cut else FinishReason.STOP
    return Trajectory((1,), (2,) * length, (source,) * length, (0.0,) * length, (0,) * length, reward, outcome, finish)


def test_demonstrations_do_not_count_as_the_policy_s_success() -> None:
    groups = [
        Group("a", (_row(0.0), _row(0.0), _row(1.0, off=True))),
        Group("b", (_row(1.0), _row(1.0), _row(1.0, off=True))),
    ]
    metrics = rollout_metrics(groups)
    assert metrics["reward/mean"] == 0.5
    assert metrics["batch/solve_none"] == 0.5
    assert metrics["batch/solve_all"] == 0.5
    assert metrics["batch/off_reward"] == 1.0


def test_lengths_and_shares() -> None:
    metrics = rollout_metrics(
        [Group("a", (_row(1.0, length=4, cut=True), _row(0.0, length=2), _row(1.0, 6, off=True)))]
    )
    assert metrics["rollout/response_length_mean"] == 3.0
    assert metrics["rollout/off_policy_length_mean"] == 6.0
    assert metrics["rollout/truncated_share"] == 0.5
    assert metrics["batch/off_policy_token_share"] == pytest.approx(0.5)
    assert metrics["reward/wrong_share"] == 0.5


def test_off_policy_figures_are_left_out_without_demonstrations() -> None:
    metrics = rollout_metrics([Group("a", (_row(1.0), _row(0.0)))])
    assert "batch/off_reward" not in metrics
    assert metrics["batch/off_policy_token_share"] == 0.0

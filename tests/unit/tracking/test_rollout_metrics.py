"""What a step's groups say."""

import math
from dataclasses import replace

import pytest
from synthetic.trajectories import row_of

from luffy.tracking.rollout_metrics import learned_metrics, rollout_metrics, staleness_metrics
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory


def _row(reward: float, length: int = 2, off: bool = False, cut: bool = False) -> Trajectory:
    finish = FinishReason.LENGTH if cut else FinishReason.STOP
    return row_of(reward, (2,) * length, Source.OFF_POLICY if off else Source.ON_POLICY, finish_reason=finish)


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


def test_failed_rows_are_counted_and_have_no_reward() -> None:
    crashed = replace(_row(0.0), outcome=Outcome.CRASHED, finish_reason=FinishReason.ENVIRONMENT_ERROR)
    groups = [Group("a", (_row(1.0), _row(1.0)), failed=(crashed, crashed)), Group("b", (), failed=(crashed,) * 4)]
    metrics = rollout_metrics(groups)
    assert (metrics["reward/mean"], metrics["batch/solve_all"], metrics["batch/solve_none"]) == (1.0, 1.0, 0.0)
    assert (metrics["reward/correct_share"], metrics["reward/crashed_share"]) == (0.25, 0.75)
    assert (metrics["rollout/num_drawn"], metrics["rollout/truncated_share"]) == (8.0, 0.0)
    assert rollout_metrics(groups[1:])["reward/crashed_share"] == 1.0


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


def _hybrid(reward: float, given: int, own: int, begins: Source = Source.OFF_POLICY) -> Trajectory:
    return row_of(reward, (2,) * (given + own), (begins,) * given + (Source.ON_POLICY,) * own)


def test_hybrid_rows_count_by_token_and_do_not_judge_the_policy() -> None:
    metrics = rollout_metrics(
        [Group("a", (_row(0.0, length=4), _hybrid(1.0, 3, 1), _hybrid(0.0, 1, 3), _row(1.0, 4, off=True)))]
    )
    assert metrics["reward/mean"] == 0.0
    assert metrics["batch/prefix_share_mean"] == 0.5
    assert metrics["batch/off_policy_token_share"] == 0.5
    assert metrics["batch/off_reward"] == pytest.approx(2 / 3)


def test_where_every_row_is_guided_those_that_the_policy_finished_stand_in() -> None:
    groups = [
        Group("a", (_hybrid(1.0, 3, 1), _hybrid(0.0, 1, 1), _row(1.0, off=True))),
        Group("b", (_row(1.0, off=True),)),
    ]
    metrics = rollout_metrics(groups)
    assert metrics["reward/mean"] == 0.5
    assert metrics["rollout/response_length_mean"] == 3.0
    assert metrics["batch/solve_none"] == metrics["batch/solve_all"] == 0.0


def test_a_group_without_rollouts_beside_others_says_nothing_of_the_policy() -> None:
    metrics = rollout_metrics([Group("a", (_row(1.0),)), Group("b", (_hybrid(0.0, 1, 1),))])
    assert metrics["reward/mean"] == metrics["batch/solve_all"] == 1.0
    assert metrics["batch/solve_none"] == 0.0


def test_groups_whose_rewards_are_all_equal_are_counted_with_their_traces() -> None:
    silent, speaking = Group("a", (_row(1.0), _row(1.0, off=True))), Group("b", (_row(0.0), _row(1.0, off=True)))
    assert rollout_metrics([silent, speaking])["batch/zero_variance_share"] == 0.5


def test_replayed_rows_are_a_share_of_groups_and_neither_rollouts_nor_guidance() -> None:
    replayed = _hybrid(1.0, 2, 0, begins=Source.REPLAY)
    groups = [Group("a", (_row(0.0), replayed)), Group("b", (_row(0.0), _row(0.0)))]
    metrics = rollout_metrics(groups, replays=True)
    assert metrics["batch/replayed_share"] == 0.5
    assert metrics["reward/mean"] == 0.0
    assert metrics["batch/off_policy_token_share"] == 0.25
    assert "batch/off_reward" not in metrics
    assert rollout_metrics(groups[1:], replays=True)["batch/replayed_share"] == 0.0
    assert "batch/replayed_share" not in rollout_metrics(groups)


@pytest.mark.parametrize("groups", [[], [Group("a", (_row(1.0, off=True),))]])
def test_there_are_numbers_even_where_the_policy_said_nothing(groups: list[Group]) -> None:
    metrics = rollout_metrics(groups, replays=True)
    assert metrics["reward/mean"] == 0.0
    assert all(map(math.isfinite, metrics.values()))


def test_staleness_is_counted_over_the_tokens_sampled_for_the_step() -> None:
    def drawn(*versions: int) -> Trajectory:
        return row_of(1.0, (3,) * len(versions), weight_version=versions)

    trace = replace(drawn(-1, -1), source=(Source.OFF_POLICY,) * 2)
    groups = [Group("a", (drawn(9, 9, 8), trace)), Group("b", (drawn(7, 5),))]
    metrics = staleness_metrics(groups, step=10, bound=2)
    assert metrics == {
        "batch/stale_dropped_share": 0.5,
        "rollout/staleness_mean": (0 + 0 + 1 + 2 + 4) / 5,
        "rollout/staleness_max": 4.0,
        "rollout/staleness_0_share": 0.4,
        "rollout/staleness_1_share": 0.2,
        "rollout/staleness_2_share": 0.2,
    }
    assert staleness_metrics(groups, step=10, bound=0) == {}


def test_what_was_drawn_counts_displaced_and_guided_rows_and_no_traces() -> None:
    group = Group("a", (_row(0.0, length=4), _hybrid(1.0, 3, 2), _row(1.0, 5, off=True)), (_row(0.0, length=3),))
    metrics = rollout_metrics([group])
    assert (metrics["rollout/num_drawn"], metrics["rollout/tokens_drawn"]) == (3.0, 4.0 + 2.0 + 3.0)


def test_what_is_learned_from_counts_traces_and_no_displaced_rows() -> None:
    group = Group("a", (_row(0.0, length=4), _row(1.0, 5, off=True)), (_row(0.0, length=3),))
    assert learned_metrics([group]) == {"batch/num_rows": 2.0, "batch/response_tokens": 9.0}
    assert learned_metrics([group], passes=3) == {"batch/num_rows": 6.0, "batch/response_tokens": 27.0}
    trace = _row(1.0, 5, off=True)
    assert learned_metrics([group], [trace], passes=2) == {"batch/num_rows": 5.0, "batch/response_tokens": 23.0}
    assert learned_metrics([]) == {"batch/num_rows": 0.0, "batch/response_tokens": 0.0}

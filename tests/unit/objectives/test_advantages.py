"""Group advantages against cases worked by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luffy.config.group import GroupMeanAdvantage
from luffy.objectives.advantages import RowRewards, group_advantages

JOINT = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=False)


def _advantages(rewards: list[float], off: list[bool], config: GroupMeanAdvantage = JOINT) -> list[float]:
    return _of_groups(rewards, [0] * len(rewards), off, config)


def _of_groups(
    rewards: list[float], groups: list[int], off: list[bool], config: GroupMeanAdvantage = JOINT
) -> list[float]:
    lengths = torch.ones(len(rewards), dtype=torch.long)
    rows = RowRewards(torch.tensor(rewards), lengths, torch.tensor(groups), torch.tensor(off))
    return group_advantages(rows, config).tolist()


@pytest.mark.parametrize("solved", range(8))
def test_luffy_group_with_k_of_seven_solved(solved: int) -> None:
    rewards = [1.0] * solved + [0.0] * (7 - solved) + [1.0]
    found = _advantages(rewards, [False] * 7 + [True])
    mean = (solved + 1) / 8
    assert found == pytest.approx([reward - mean for reward in rewards])
    assert found[-1] == pytest.approx(1 - mean)  # all rollouts wrong: 0.875 for the demonstration


@pytest.mark.parametrize("scale_by_std", [False, True])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1e6])
def test_group_without_variance_has_exactly_no_advantage(reward: float, scale_by_std: bool) -> None:
    config = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=scale_by_std)
    assert _advantages([reward] * 8, [False] * 7 + [True], config) == [0.0] * 8


def test_split_group_leaves_the_demonstration_outside() -> None:
    config = GroupMeanAdvantage(kind="group_mean", population="on_policy", scale_by_std=False)
    assert _advantages([1.0, 0.0, 0.0, 1.0], [False, False, False, True], config) == pytest.approx(
        [2 / 3, -1 / 3, -1 / 3, 0.0]
    )


def test_grpo_divides_by_the_unbiased_standard_deviation() -> None:
    config = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=True)
    rewards = [1.0, 0.0, 0.0, 0.0]
    expected = [(reward - 0.25) / (torch.tensor(rewards).std().item() + 1e-6) for reward in rewards]
    assert _advantages(rewards, [False] * 4, config) == pytest.approx(expected)


def test_groups_do_not_see_each_other() -> None:
    assert _of_groups([1.0, 0.0, 5.0, 5.0], [0, 0, 1, 1], [False] * 4) == [0.5, -0.5, 0.0, 0.0]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12))
def test_joint_advantages_sum_to_zero(rewards: list[float]) -> None:
    assert sum(_advantages(rewards, [False] * len(rewards))) == pytest.approx(0.0, abs=1e-5)

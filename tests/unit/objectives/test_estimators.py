"""Advantage estimators against their formulas, row by row and token by token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from reference import formulas
from reference.token_cases import alone
from torch import Tensor

from luffy.config.group import AdvantageConfig, GeneralizedAdvantage
from luffy.objectives.advantages import RowRewards, generalized_advantages, group_advantages, whiten


@dataclass(frozen=True)
class Sample:
    """One row of a group."""

    reward: float
    length: int = 3
    off: bool = False


# Eighths are exact in binary, so that equal rewards are equal.
_REWARD = st.one_of(st.sampled_from([0.0, 1.0]), st.integers(-16, 16).map(lambda i: i / 8))
_SAMPLE = st.builds(Sample, _REWARD, st.integers(1, 9), st.booleans())
_GROUPS = st.lists(st.lists(_SAMPLE, min_size=1, max_size=8), min_size=1, max_size=4)


def _estimate(groups: Sequence[Sequence[Sample]], config: AdvantageConfig) -> list[list[float]]:
    rows = [(sample, g) for g, group in enumerate(groups) for sample in group]
    flat = group_advantages(
        RowRewards(
            reward_B=torch.tensor([sample.reward for sample, _ in rows], dtype=torch.float64),
            length_B=torch.tensor([sample.length for sample, _ in rows]),
            group_B=torch.tensor([g for _, g in rows]),
            is_off_policy_B=torch.tensor([sample.off for sample, _ in rows]),
        ),
        config,
    ).tolist()
    taken = iter(flat)
    return [[next(taken) for _ in group] for group in groups]


def _inside(group: Sequence[Sample], population: str) -> list[Sample]:
    return [sample for sample in group if population == "joint" or not sample.off]


def _spread(group: Sequence[Sample], population: str, advantages: Sequence[float]) -> list[float]:
    """The members' advantages at their rows, 0 for the others."""
    taken = iter(advantages)
    return [next(taken) if population == "joint" or not sample.off else 0.0 for sample in group]


def _rewards(rows: Sequence[Sample]) -> list[float]:
    return [row.reward for row in rows]


def _best_of(k: int, rows: Sequence[Sample]) -> Sequence[float]:
    """A row is right where its reward is above 0, so also with partial credit."""
    return formulas.pass_at_k([row.reward > 0 for row in rows], k) if len(rows) >= k else [0.0] * len(rows)


def _config(text: str, **settings: object) -> AdvantageConfig:
    kind, *more = text.split()
    given = {"kind": kind, **dict(word.split("=") for word in more), **settings}
    return TypeAdapter(AdvantageConfig).validate_strings(given)


# What one right row of four has, of 1 of 10 tokens, and each other. The deviation is 1/2; pass@2 is 1/2 over six pairs,
# a wrong row being in 1 right one of 3; pass@3 is 3/4 over four triples, a wrong row being in 2 right ones of 3.
BY_GROUP: dict[str, tuple[Callable[[Sequence[Sample]], Sequence[float]], tuple[float, float]]] = {
    "group_mean scale_by_std=false": (lambda rows: formulas.group_mean(_rewards(rows), False), (0.75, -0.25)),
    "group_mean scale_by_std=true": (lambda rows: formulas.group_mean(_rewards(rows), True), (1.5, -0.5)),
    "leave_one_out": (lambda rows: formulas.leave_one_out(_rewards(rows)), (1.0, -1 / 3)),
    "length_weighted": (lambda rows: formulas.length_weighted(_rewards(rows), [r.length for r in rows]), (0.9, -0.1)),
    "pass_at_k k=2": (partial(_best_of, 2), (1.0, -1 / 3)),
    "pass_at_k k=3": (partial(_best_of, 3), (1 / 3**0.5, -1 / 27**0.5)),
    "pass_at_k k=4": (partial(_best_of, 4), (0.0, 0.0)),
}
WHOLE_BATCH = ("global_batch group_baseline=false", "global_batch group_baseline=true")
POPULATIONS = pytest.mark.parametrize("population", ["joint", "on_policy"])


@POPULATIONS
@pytest.mark.parametrize("name", BY_GROUP)
@given(groups=_GROUPS)
def test_every_group_by_itself_is_what_the_formula_says_of_its_population(name, population, groups):
    for group, found in zip(groups, _estimate(groups, _config(name, population=population)), strict=True):
        members = _inside(group, population)
        expected = _spread(group, population, BY_GROUP[name][0](members) if members else [])
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@POPULATIONS
@pytest.mark.parametrize("name", WHOLE_BATCH)
@given(groups=_GROUPS)
def test_global_batch(population: str, name: str, groups: list[list[Sample]]) -> None:
    config = _config(name, population=population)
    members = [rows for group in groups if (rows := _inside(group, population))]
    rewards, lengths = [_rewards(g) for g in members], [[r.length for r in g] for g in members]
    centred = [r - (sum(g) / len(g) if config.group_baseline else 0.0) for g in rewards for r in g]
    assume(centred and max(centred) - min(centred) > 0.01)
    expected = iter([a for g in formulas.global_batch(rewards, lengths, config.group_baseline) for a in g])
    for group, found in zip(groups, _estimate(groups, config), strict=True):
        by_hand = _spread(group, population, [next(expected) for _ in _inside(group, population)])
        assert found == pytest.approx(by_hand, rel=1e-3, abs=1e-6)  # the engine adds 1e-6 to the deviation


@pytest.mark.parametrize("name", [*BY_GROUP, *WHOLE_BATCH])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -0.3, 1e6, 8814.092912391603])
def test_equal_rewards_give_exactly_nothing(name: str, reward: float) -> None:
    groups = [[Sample(reward, length) for length in (1, 5, 2)], [Sample(reward, 7)] * 7]
    assert _estimate(groups, _config(name, population="joint")) == [[0.0] * 3, [0.0] * 7]


@given(groups=_GROUPS)
def test_the_raw_advantage_is_the_reward_of_every_row_traces_included(groups: list[list[Sample]]) -> None:
    assert _estimate(groups, _config("raw")) == [_rewards(group) for group in groups]


@pytest.mark.parametrize("name", BY_GROUP)
def test_one_right_row_of_four(name: str) -> None:
    (found,) = _estimate([[Sample(1.0, 1), *[Sample(0.0, 3)] * 3]], _config(name, population="joint"))
    right, wrong = BY_GROUP[name][1]
    assert found == pytest.approx([right, wrong, wrong, wrong], rel=1e-5)


# ---- tokens ----

_VALUES = st.lists(st.floats(-2.0, 2.0), min_size=1, max_size=7)
_ROW = st.tuples(st.floats(-2.0, 2.0), _VALUES, st.integers(0, 3))


def _layout(rows: list[tuple[float, list[float], int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and masks: each response begins at a token of its own and is interrupted by an environment's
    tokens after every second of its own; rubbish outside."""
    width = max(start + 2 * len(values) for _, values, start in rows) + 1
    value_BT, mask_BT = torch.full((len(rows), width), 77.0), torch.zeros(len(rows), width, dtype=torch.bool)
    for b, (_, values, start) in enumerate(rows):
        places = [start + i + i // 2 for i in range(len(values))]
        value_BT[b, places] = torch.tensor(values)
        mask_BT[b, places] = True
    return torch.tensor([reward for reward, _, _ in rows]), value_BT, mask_BT


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
@given(rows=st.lists(_ROW, min_size=1, max_size=4))
def test_gae_is_its_sum(gamma: float, lam: float, rows: list[tuple[float, list[float], int]]) -> None:
    config = GeneralizedAdvantage(kind="gae", gamma=gamma, lam=lam)
    reward_B, value_BT, mask_BT = _layout(rows)
    advantage_BT, return_BT = generalized_advantages(reward_B, value_BT, mask_BT, config)
    for b, (reward, values, _) in enumerate(rows):
        advantages, returns = formulas.gae(reward, values, gamma, lam)
        assert advantage_BT[b][mask_BT[b]].tolist() == pytest.approx(advantages, abs=1e-6)  # inputs are float32
        assert return_BT[b][mask_BT[b]].tolist() == pytest.approx(returns, abs=1e-6)
    assert not advantage_BT[~mask_BT].any() and not return_BT[~mask_BT].any()


def test_gae_by_hand() -> None:
    config = GeneralizedAdvantage(kind="gae", gamma=0.5, lam=0.5)
    reward_B, value_BT, mask_BT = _layout([(1.0, [0.2, 0.4], 1)])
    advantage_BT, return_BT = generalized_advantages(reward_B, value_BT, mask_BT, config)
    # Last: 1 - 0.4 = 0.6. First: 0.5 x 0.4 - 0.2 + 0.25 x 0.6 = 0.15.
    assert advantage_BT[0, 1:3].tolist() == pytest.approx([0.15, 0.6])
    assert return_BT[0, 1:3].tolist() == pytest.approx([0.35, 1.0])


@given(rows=st.lists(_ROW, min_size=2, max_size=4))
def test_whitening(rows: list[tuple[float, list[float], int]]) -> None:
    _, value_BT, mask_BT = _layout(rows)
    inside = value_BT[mask_BT].tolist()
    assume(max(inside) - min(inside) > 1e-2)
    found_BT = whiten(value_BT.double(), mask_BT, alone)
    assert found_BT[mask_BT].tolist() == pytest.approx(formulas.whitened(inside), rel=1e-5, abs=1e-5)
    assert not found_BT[~mask_BT].any()


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6])
def test_whitening_equal_advantages_leaves_nothing(value: float) -> None:
    mask_BT = torch.tensor([[True, True, True], [True, True, False]])
    found_BT = whiten(torch.full((2, 3), value, dtype=torch.float64), mask_BT, alone)
    assert found_BT.abs().max() < 1e-6

"""Denominators: which tokens are counted, and that empty populations are harmless."""

import pytest
import torch
from reference.gradient_case import PRESETS, terms_of

from luffy.config.objective import NegativeLogLikelihoodLoss, NormaliserConfig, SurrogateLoss, TermConfig
from luffy.objectives.losses import TokenBatch
from luffy.objectives.normalisation import token_weights
from luffy.objectives.objective import objective_loss
from luffy.types import TrainBatch

# Row 0: rollout of 3 tokens, row 1: rollout of 1, row 2: demonstration of 4 (prompt of 1 token each).
LENGTHS, OFF = (3, 1, 4), (False, False, True)


def _batch(lengths: tuple[int, ...] = LENGTHS, off: tuple[bool, ...] = OFF) -> TrainBatch:
    position = torch.arange(6).expand(len(lengths), 6)
    length_B1 = torch.tensor(lengths).unsqueeze(-1)
    response = (position >= 1) & (position <= length_B1)
    zeros = torch.zeros(len(lengths), 6)
    return TrainBatch(
        input_ids_BT=torch.ones(len(lengths), 6, dtype=torch.long),
        attention_mask_BT=position <= length_B1,
        response_mask_BT=response,
        is_off_policy_BT=response & torch.tensor(off).unsqueeze(-1),
        advantage_BT=zeros + 1,
        logp_old_BT=zeros,
        logp_behavior_BT=zeros + torch.nan,
    )


def _weights(batch: TrainBatch, mode: str, population: str, terms: tuple[TermConfig, ...] = ()) -> torch.Tensor:
    on = TermConfig(
        name="on",
        select="on_policy",
        loss=SurrogateLoss(kind="surrogate"),
        normaliser=NormaliserConfig(mode=mode, population=population),
    )
    return token_weights((on, *terms), batch, max_response_tokens=10, sum_over_ranks=lambda tensor: tensor)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", [1 / 4] * 3 + [1 / 4]),
        ("sequence", [1 / 6] * 3 + [1 / 2]),
        ("constant", [1 / 20] * 3 + [1 / 20]),
    ],
)
def test_weights_of_each_mode_by_hand(mode: str, expected: list[float]) -> None:
    weight = _weights(_batch(), mode, "own")[0]
    assert weight[weight != 0].tolist() == pytest.approx(expected)


def test_joint_population_counts_demonstrations_of_another_policy_gradient_term() -> None:
    on, off = terms_of("luffy")[:2]
    weights = token_weights((on, off), _batch(), 10, lambda tensor: tensor)
    assert weights[0][0, 1] == pytest.approx(1 / 8)
    assert weights[1][2, 1] == pytest.approx(1 / 8)


def test_auxiliary_rows_stay_out_of_the_joint_denominator() -> None:
    sft = TermConfig(
        name="sft",
        select="off_policy",
        loss=NegativeLogLikelihoodLoss(kind="nll"),
        coefficient=0.5,
        normaliser=NormaliserConfig(mode="token", population="own"),
    )
    weights = _weights(_batch(), "token", "joint", (sft,))
    assert weights[0].sum() == pytest.approx(1.0)
    assert weights[1].sum() == pytest.approx(0.5)


def test_denominators_are_summed_over_ranks() -> None:
    alone = _weights(_batch(), "token", "own")
    two_ranks = token_weights(terms_of("on_policy")[:1], _batch(), 10, lambda tensor: tensor * 2)
    assert two_ranks[0].sum() == pytest.approx(float(alone[0].sum()) / 2)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("off", [(False, False), (True, True)], ids=["no_demonstration", "no_rollout"])
def test_a_batch_without_one_kind_of_row_gives_a_finite_loss(preset: str, off: tuple[bool, ...]) -> None:
    batch, terms = _batch((3, 2), off), terms_of(preset)
    weights = token_weights(terms, batch, 10, lambda tensor: tensor)
    logp = torch.full((2, 6), -0.5, requires_grad=True)
    tokens = TokenBatch(logp, logp.exp(), batch.logp_old_BT, batch.logp_behavior_BT, batch.advantage_BT)
    loss = objective_loss(terms, tokens, weights).loss
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logp.grad).all()


def test_overflow_at_an_unselected_token_does_not_reach_the_gradient() -> None:
    terms, batch = terms_of("on_policy")[:1], _batch()
    weights = token_weights(terms, batch, 10, lambda tensor: tensor)
    logp = torch.zeros(3, 6)
    logp[:, 0] = 1e4  # a prompt token: exp() overflows
    logp.requires_grad_()
    tokens = TokenBatch(logp, logp.detach(), batch.logp_old_BT, batch.logp_behavior_BT, batch.advantage_BT)
    objective_loss(terms, tokens, weights).loss.backward()
    assert torch.isfinite(logp.grad).all()

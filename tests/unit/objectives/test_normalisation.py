"""Denominators: which tokens are counted, and that empty populations are harmless."""

from pathlib import Path

import pytest
import torch
from reference.row_batches import Row, alone, demonstration, objective_of, row_batch, tokens_of
from reference.taught_presets import teacher_overrides

from luffy.config import available_presets, load_experiment
from luffy.config.terms import (
    NegativeLogLikelihoodLoss,
    NormaliserConfig,
    RationalShaping,
    ShapedSurrogateLoss,
    SurrogateLoss,
    TermConfig,
)
from luffy.objectives.objective import objective_loss, token_weights

ROOT = Path(__file__).resolve().parents[3]
# A rollout of 3 tokens, one of 1, a demonstration of 4; prompts of one token each.
ROWS = (Row(3), Row(1), demonstration(4))


def _on(mode: str = "token", population: str = "own") -> TermConfig:
    return TermConfig(
        name="on",
        select="on_policy",
        loss=SurrogateLoss(kind="surrogate"),
        normaliser=NormaliserConfig(mode=mode, population=population),
    )


def _weights(*terms: TermConfig) -> torch.Tensor:
    return token_weights(objective_of(*terms), row_batch(ROWS), alone)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", [1 / 4] * 3 + [1 / 4]),
        ("sequence", [1 / 6] * 3 + [1 / 2]),
        ("constant", [1 / 20] * 3 + [1 / 20]),
    ],
)
def test_weights_of_each_mode_by_hand(mode: str, expected: list[float]) -> None:
    weight = _weights(_on(mode))[0]
    assert weight[weight != 0].tolist() == pytest.approx(expected)


def test_joint_population_counts_demonstrations_of_another_policy_gradient_term() -> None:
    off = TermConfig(
        name="off",
        select="off_policy",
        loss=ShapedSurrogateLoss(kind="shaped_surrogate", shaping=RationalShaping(kind="rational")),
        normaliser=NormaliserConfig(mode="token", population="joint"),
    )
    weights = _weights(_on("token", "joint"), off)
    assert weights[0][0, 1] == pytest.approx(1 / 8)
    assert weights[1][2, 1] == pytest.approx(1 / 8)


def test_one_trace_beside_seven_rollouts_of_its_length_weighs_one_eighth() -> None:
    """Not one half, which is what a mean over the rollouts plus a mean over the trace would give it."""
    on, off = _terms_of("luffy")[:2]
    batch = row_batch((*[Row(4)] * 7, demonstration(4)))
    weights = token_weights(objective_of(on, off), batch, alone)
    assert weights[1].sum() == pytest.approx(1 / 8)
    assert weights[0].sum() == pytest.approx(7 / 8)


def test_auxiliary_rows_stay_out_of_the_joint_denominator() -> None:
    sft = TermConfig(
        name="sft",
        select="off_policy",
        loss=NegativeLogLikelihoodLoss(kind="nll"),
        coefficient=0.5,
        normaliser=NormaliserConfig(mode="token", population="own"),
    )
    weights = _weights(_on("token", "joint"), sft)
    assert weights[0].sum() == pytest.approx(1.0)
    assert weights[1].sum() == pytest.approx(0.5)


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_denominators_are_summed_over_ranks(mode: str) -> None:
    two_ranks = token_weights(objective_of(_on(mode)), row_batch(ROWS), lambda tensor: tensor * 2)
    torch.testing.assert_close(two_ranks, _weights(_on(mode)) / 2)


def _terms_of(preset: str) -> tuple[TermConfig, ...]:
    config = load_experiment(ROOT / "exp_configs/smoke.yaml", [f"method={preset}", *teacher_overrides(preset)])
    if "rl" in config.stages:
        assert config.objective is not None
        return config.objective.terms
    assert config.sft is not None
    return config.sft.objective.terms


@pytest.mark.parametrize("preset", available_presets("methods"))
@pytest.mark.parametrize("rows", [(Row(3), Row(2)), (demonstration(3), demonstration(2))], ids=["rollouts", "traces"])
def test_a_batch_without_one_kind_of_row_gives_a_finite_loss(preset: str, rows: tuple[Row, ...]) -> None:
    batch, terms = row_batch(rows), _terms_of(preset)
    weights = token_weights(objective_of(*terms), batch, alone)
    logp = torch.full(batch.input_ids_BT.shape, -0.5, requires_grad=True)
    loss = objective_loss(terms, tokens_of(batch, logp, logp.exp()), weights).loss
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logp.grad).all()


def test_overflow_at_an_unselected_token_does_not_reach_the_gradient() -> None:
    batch = row_batch(ROWS)
    logp = torch.zeros(batch.input_ids_BT.shape)
    logp[:, 0] = 1e4  # a prompt token: exp() overflows
    logp.requires_grad_()
    objective_loss((_on(),), tokens_of(batch, logp), _weights(_on())).loss.backward()
    assert torch.isfinite(logp.grad).all()

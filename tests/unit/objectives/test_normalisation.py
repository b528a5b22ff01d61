"""Denominators: which tokens are counted, and that empty populations are harmless."""

from pathlib import Path

import pytest
import torch
from reference.row_batches import Row, alone, demonstration, objective_of, row_batch, tokens_of
from reference.taught_presets import teacher_overrides

from luffy.config import available_presets, load_experiment
from luffy.config.terms import (
    NormaliserConfig,
    SurrogateLoss,
    TermConfig,
)
from luffy.objectives.objective import objective_loss, token_weights

ROOT = Path(__file__).resolve().parents[3]
# A rollout of 3 tokens, one of 1, a demonstration of 4; prompts of one token each.
ROWS = (Row(3), Row(1), demonstration(4))


def _on(mode: str) -> TermConfig:
    normaliser = NormaliserConfig(mode=mode, population="own")
    return TermConfig(name="on", select="on_policy", loss=SurrogateLoss(kind="surrogate"), normaliser=normaliser)


def _weights(*terms: TermConfig) -> torch.Tensor:
    return token_weights(objective_of(*terms), row_batch(ROWS), alone)


def test_one_trace_beside_seven_rollouts_of_its_length_weighs_one_eighth() -> None:
    """Not one half, which is what a mean over the rollouts plus a mean over the trace would give it."""
    on, off = _terms_of("luffy")[:2]
    batch = row_batch((*[Row(4)] * 7, demonstration(4)))
    weights = token_weights(objective_of(on, off), batch, alone)
    assert weights[1].sum() == pytest.approx(1 / 8)
    assert weights[0].sum() == pytest.approx(7 / 8)


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

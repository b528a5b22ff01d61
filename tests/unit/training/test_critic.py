"""The critic: where its values stand, and that its gradient equals a float64 reference however a step is cut up."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from reference.gradient_case import execution, relative_l2, tiny_model
from reference.value_case import at_tokens, batch, config, engine_steps, part_of, reference_steps, targets
from transformers import PreTrainedModel

from luffy.errors import NumericalError
from luffy.training.critic import Critic, value_loss
from luffy.types import TrainBatch

TOLERANCE = 1e-5
SPLITS = {
    "one_batch": {"micro_batch_tokens": 10_000},
    "one_row_each": {"micro_batch_tokens": 1},
    "packed_one_batch": {"micro_batch_tokens": 10_000, "packing": True},
    "packed_some_rows": {"micro_batch_tokens": 25, "packing": True},
    "gradient_checkpointing": {"micro_batch_tokens": 25, "gradient_checkpointing": True},
    "zero_2": {"micro_batch_tokens": 25, "zero_stage": 2},
}


@functools.cache
def _model() -> PreTrainedModel:
    """One for all splits, so that its reference is computed once."""
    return tiny_model()


def _critic(value_clip: float | None = 0.2, **settings: object) -> Critic:
    return Critic(tiny_model(), config(value_clip), execution(**settings), "float32")


def _learn(critic: Critic, lr: float = 1.0) -> dict[str, float]:
    rows = batch()
    return critic.update(_with_targets(critic, rows, at_tokens(targets().returns, rows)), lr)


def _with_targets(critic: Critic, rows: TrainBatch, return_BT: torch.Tensor) -> TrainBatch:
    return replace(rows, value_old_BT=critic.values(rows), return_BT=return_BT)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_gradient_and_parameters_equal_the_float64_reference_for_any_split(value_clip, split):
    expected_gradients, expected_parameters = reference_steps(_model(), value_clip)
    gradients, parameters, metrics = engine_steps(_model(), value_clip, slice(None), SPLITS[split])
    for part in ("decoder.", "head."):
        assert relative_l2(part_of(gradients, part), part_of(expected_gradients, part)) < TOLERANCE, part
        assert relative_l2(part_of(parameters, part), part_of(expected_parameters, part)) < TOLERANCE, part
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected_gradients.values()))
    assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert (0.2 < metrics["critic/clip_fraction"] < 0.8) if value_clip else metrics["critic/clip_fraction"] == 0


def test_values_stand_at_response_tokens_only_and_know_the_tokens_before_their_own_alone() -> None:
    critic, rows = _critic(), batch()
    assert torch.equal(critic.values(rows), torch.zeros(rows.input_ids_BT.shape))
    _learn(critic)
    value_BT = critic.values(rows)
    assert torch.equal(value_BT != 0, rows.response_mask_BT)
    assert value_BT.dtype == torch.float32 and not value_BT.requires_grad
    before_T, place = value_BT[1], 6
    rows.input_ids_BT[1, place] += 1
    after_T = critic.values(rows)[1]
    assert torch.equal(before_T[: place + 1], after_T[: place + 1])
    assert (before_T[place + 1 :] != after_T[place + 1 :])[rows.response_mask_BT[1, place + 1 :]].all()


@pytest.mark.parametrize("packing", [False, True])
def test_values_do_not_depend_on_the_micro_batch(packing: bool) -> None:
    critics = [_critic(micro_batch_tokens=10_000), _critic(micro_batch_tokens=20, packing=packing)]
    whole_BT, cut_BT = (critic.values(batch()) for critic in critics if _learn(critic))
    assert torch.allclose(whole_BT, cut_BT, atol=1e-6)


def test_metrics_are_those_of_the_whole_step() -> None:
    critic, rows = _critic(value_clip=None, micro_batch_tokens=20), batch()
    _learn(critic)
    values, returns = critic.values(rows)[rows.response_mask_BT].double(), torch.cat(targets().returns).double()
    metrics = _learn(critic)
    assert metrics["critic/loss"] == pytest.approx(float((values - returns).square().mean() / 2), rel=1e-6)
    assert metrics["critic/value_mean"] == pytest.approx(float(values.mean()), rel=1e-6)
    assert metrics["critic/return_mean"] == pytest.approx(float(returns.mean()), rel=1e-6)
    explained = 1 - (returns - values).var(unbiased=False) / returns.var(unbiased=False)
    assert metrics["critic/explained_variance"] == pytest.approx(float(explained), rel=1e-5)
    assert metrics["critic/lr"] == 1.0
    equal_BT = 0.1 * rows.response_mask_BT.float()
    assert "critic/explained_variance" not in critic.update(_with_targets(critic, rows, equal_BT), 0.1)


def test_the_clip_takes_the_worse_of_both_values() -> None:
    value, old, wanted = torch.tensor([0.5, 0.5, -0.3]), torch.zeros(3), torch.tensor([1.0, -1.0, 0.0])
    loss, is_clipped = value_loss(value, old, wanted, value_clip=0.2)
    # The first moved 0.5 towards its return, of which 0.2 count; the others moved away, and are held to all of it.
    assert loss.tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 1.5**2, 0.5 * 0.3**2])
    assert is_clipped.tolist() == [True, False, False]


def test_a_return_that_is_not_finite_leaves_the_weights_alone() -> None:
    critic, rows = _critic(), batch()
    return_BT = torch.where(rows.response_mask_BT, torch.inf, 0.0)
    start = {name: parameter.clone() for name, parameter in critic.engine.module.named_parameters()}
    with pytest.raises(NumericalError, match="critic's loss"):
        critic.update(_with_targets(critic, rows, return_BT), 0.1)
    assert all(torch.equal(parameter, start[name]) for name, parameter in critic.engine.module.named_parameters())

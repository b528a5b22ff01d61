"""The proof: gradients and parameters do not depend on how a step is cut up, and equal a float64 reference."""

import copy

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from reference.gradient_case import (
    MAX_RESPONSE_TOKENS,
    OPTIMIZER,
    PRESETS,
    execution,
    make_batch,
    reference_step,
    relative_l2,
    terms_of,
    tiny_model,
)

from luffy.training.policy import Policy

TOLERANCE = 1e-5
SPLITS = {
    "one_batch": {"micro_batch_tokens": 10_000},
    "one_row_each": {"micro_batch_tokens": 1},
    "some_rows": {"micro_batch_tokens": 40},
    "packed_one_batch": {"micro_batch_tokens": 10_000, "packing": True},
    "packed_some_rows": {"micro_batch_tokens": 40, "packing": True},
    "gradient_checkpointing": {"micro_batch_tokens": 40, "gradient_checkpointing": True},
}


def _names(policy: Policy) -> dict[str, torch.nn.Parameter]:
    return dict(policy.causal_lm.named_parameters())


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("preset", PRESETS)
def test_gradient_and_parameters_equal_the_float64_reference_for_any_split(preset: str, split: str) -> None:
    model = tiny_model()
    batch = make_batch(preset, model)
    expected_gradients, expected_parameters = reference_step(preset, model)
    policy = Policy(copy.deepcopy(model), OPTIMIZER, execution(**SPLITS[split]), "float32")
    policy.accumulate(batch, terms_of(preset), MAX_RESPONSE_TOKENS)
    gradients = {name: safe_get_full_grad(parameter) for name, parameter in _names(policy).items()}
    assert relative_l2(gradients, expected_gradients) < TOLERANCE
    policy.engine.step()
    parameters = {name: parameter.detach() for name, parameter in _names(policy).items()}
    start = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    # Compare the movement: the parameters themselves would hide an error of scale behind their own size.
    moved = {name: parameters[name].double() - start[name] for name in start}
    expected_moved = {name: expected_parameters[name] - start[name] for name in start}
    assert relative_l2(parameters, expected_parameters) < TOLERANCE
    assert relative_l2(moved, expected_moved) < 1e-3


def test_reported_gradient_norm_is_the_one_before_clipping() -> None:
    model = tiny_model()
    batch = make_batch("luffy", model)
    gradients, _ = reference_step("luffy", model)
    norm = float(sum(gradient.square().sum() for gradient in gradients.values()).sqrt())
    policy = Policy(copy.deepcopy(model), OPTIMIZER, execution(), "float32")
    metrics = policy.update(batch, terms_of("luffy"), MAX_RESPONSE_TOKENS, lr=1e-2)
    assert norm > OPTIMIZER.max_grad_norm
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)

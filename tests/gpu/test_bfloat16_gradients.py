"""Gradients of the bfloat16 engine on a GPU against the float64 reference, by every layout of rows."""

import copy
import functools

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from reference.gradient_case import OPTIMIZER, VOCABULARY, execution, make_batch, reference_step, relative_l2, step_of
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from luffy.training.policy import Policy

BOUND = 0.04
"""Relative L2 distance of all gradients; bfloat16 has 8 bits. On a CPU these cases are at 0.015 to 0.022."""
WITHOUT_CLIP = ("luffy", "luffy_prefix", "rl_sft_loss", "srft", "sft", "cispo", "aipo", "exgrpo")
"""A hard clip turns a rounding of the ratio into a token with or without gradient: no such bound holds there."""
LAYOUTS = {
    "padded": {"micro_batch_tokens": 10_000, "packing": False},
    "packed": {"micro_batch_tokens": 40, "packing": True},
    "checkpointed": {"micro_batch_tokens": 40, "gradient_checkpointing": True},
}


@functools.cache
def model() -> PreTrainedModel:
    """Heads of 64 dimensions, which all kernels have; weights that bfloat16 holds exactly."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    made = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(parameter.bfloat16())
    return made


def accumulated(case: str, **settings: object) -> Policy:
    """A policy after the backward passes of `case`."""
    weights = copy.deepcopy(model()).bfloat16()
    policy = Policy(weights, OPTIMIZER, execution(**{"zero_stage": 1, "compile": False} | settings), "bfloat16")
    policy.accumulate(make_batch(case, model()), step_of(case))
    return policy


def distance(case: str, **settings: object) -> float:
    """Between the engine's gradients of `case` and the reference's."""
    found = {
        name: safe_get_full_grad(weight) for name, weight in accumulated(case, **settings).causal_lm.named_parameters()
    }
    return relative_l2(found, reference_step(case, model())[0])


WAYS = [
    *((case, layout, {}) for case in WITHOUT_CLIP for layout in LAYOUTS),
    *(("luffy", layout, {"compile": True}) for layout in ("padded", "packed")),
]


@pytest.mark.parametrize(("case", "layout", "settings"), WAYS)
def test_gradients_are_within_the_bound(case, layout, settings):
    assert distance(case, **LAYOUTS[layout], **settings) < BOUND


@pytest.mark.parametrize("case", ["luffy", "sft"])
def test_a_step_of_an_offloaded_optimizer_is_within_the_bound(case):
    policy = accumulated(case, micro_batch_tokens=40, offload_optimizer=True)
    policy.engine.step()
    start = {name: weight.detach().double() for name, weight in model().named_parameters()}
    expected = reference_step(case, model())[1]
    moved = {
        name: safe_get_full_fp32_param(weight).double().cpu() - start[name]
        for name, weight in policy.causal_lm.named_parameters()
    }
    assert relative_l2(moved, {name: expected[name] - start[name] for name in start}) < BOUND

"""The counted operations against those that torch counts while a real model runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from luffy.config.model import LoRAConfig
from luffy.training.policy_model import Adapter, PolicyModel
from luffy.training.update_metrics import ModelFlops, peak_flops

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
KINDS = {
    "qwen2 untied": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2 tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
}
ROWS, LENGTH, PROMPT = 3, 120, 40


def policy_of(kind):
    make, own = KINDS[kind]
    config = make(**SHAPE, **own)
    # torch counts no operations of its fused attention on a CPU.
    return config, PolicyModel(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), 1.0, 64)


def scores(policy):
    ids_BT = torch.randint(0, 300, (ROWS, LENGTH))
    response_BT = torch.arange(LENGTH).repeat(ROWS, 1) >= PROMPT
    position_BT = torch.arange(LENGTH).repeat(ROWS, 1)
    mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    return policy(ids_BT, position_BT, response_BT, {"attention_mask": mask_BT}, "value")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["forward", "training", "adapter"])
def test_a_forward_pass_and_the_training_of_model_or_adapter_take_what_is_counted(kind, what):
    config, policy = policy_of(kind)
    adapter = Adapter(policy.causal_lm, LoRAConfig(rank=4, alpha=8.0), seed=0) if what == "adapter" else None
    for weight in policy.causal_lm.parameters():
        if adapter and weight.requires_grad:
            torch.nn.init.normal_(weight)
    with FlopCounterMode(display=False) as counted, torch.set_grad_enabled(what != "forward"):
        logp_BT = scores(policy)[0]
        if what != "forward":
            logp_BT.sum().backward()
    flops = ModelFlops.of_config(config.to_dict(), adapter.num_parameters if adapter else None)
    lengths, num_scored = [LENGTH] * ROWS, ROWS * (LENGTH - PROMPT)
    expected = flops.forward(lengths, num_scored)
    if what != "forward":  # the head's logits are computed again for its gradient
        expected = flops.training(lengths, num_scored) + 2 * 300 * 64 * num_scored
    if adapter:  # nobody needs the gradient of the lowest layer's input
        shape = flops.shape
        expected -= 2 * shape.hidden_size * (shape.attention_size + 2 * shape.kv_size) * ROWS * LENGTH
    assert counted.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_a_kind_of_model_with_an_unknown_shape_is_not_counted():
    assert ModelFlops.of_config({"model_type": "gpt2"}) is None


PEAKS = {  # TFLOPS in bfloat16, by the name that torch gives
    **{"NVIDIA H200": 989.4, "NVIDIA H20": 148.0, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0},
    **{"NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A10": 125.0, "NVIDIA L40S": 362.0},
    **dict.fromkeys(("NVIDIA A10G", "NVIDIA GeForce GTX 1080", "AMD Instinct MI300X", "")),
}


@pytest.mark.parametrize(("name", "tflops"), PEAKS.items())
def test_peaks_are_found_by_name(name, tflops):
    assert peak_flops(name) == (None if tflops is None else pytest.approx(tflops * 1e12))

"""Loading under ZeRO 3: the weights of an ordinary load, without ever holding them all."""

import json
from pathlib import Path

import deepspeed
import pytest
import torch
from reference.attention_case import model_of
from reference.gradient_case import execution, make_batch, tiny_model
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from luffy.config.model import DType
from luffy.errors import DataError
from luffy.training.deepspeed_engine import is_sharded, load_to_train
from luffy.training.model_folder import load_causal_lm
from luffy.training.policy import FrozenPolicy
from luffy.training.policy_model import refuse_processed_logits

SHARDED = execution(zero_stage=3)


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers, whole."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: tensor.detach().clone() for name, tensor in named.items()}


def gpt2() -> PreTrainedModel:
    """Its head is tied to its embeddings, and its weights are stored transposed."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=32, n_embd=16, n_layer=1, n_head=2))


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "float32"), ("llama", "bfloat16"), ("gpt2", "float32")])
def test_the_weights_and_buffers_are_those_of_an_ordinary_load(kind: str, dtype: DType, tmp_path: Path) -> None:
    saved = gpt2() if kind == "gpt2" else model_of(kind)
    saved.generation_config.max_new_tokens = 7
    saved.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model, whole = load_to_train(tmp_path, dtype, SHARDED), load_causal_lm(tmp_path, dtype)
    assert is_sharded(model) and not any(parameter.numel() for parameter in model.parameters())
    found, expected = tensors(model), tensors(whole)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert model.config.to_dict() == whole.config.to_dict()
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()


def test_weights_that_are_stored_in_another_form_are_loaded_whole(tmp_path, caplog):
    config = Qwen2MoeConfig(
        vocab_size=23, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=1,
        num_experts=2, shared_expert_intermediate_size=8, num_attention_heads=2, num_key_value_heads=2,
        num_experts_per_tok=1,
    )  # fmt: skip
    mixture = Qwen2MoeForCausalLM(config)
    mixture.save_pretrained(tmp_path)
    found = load_to_train(tmp_path, "float32", SHARDED)
    assert "is loaded whole on every rank" in caplog.text and not is_sharded(found)
    assert all(torch.equal(tensor, tensors(mixture)[name]) for name, tensor in tensors(found).items())


@pytest.mark.parametrize("layout", [{"packing": True}, {"offload_parameters": True}], ids=json.dumps)
def test_a_frozen_policy_in_shares_scores_as_a_whole_one(layout: dict[str, object], tmp_path: Path) -> None:
    model = tiny_model(tie=True)
    model.save_pretrained(tmp_path)
    where = execution(zero_stage=3, micro_batch_tokens=50, **layout)
    batch = make_batch("luffy", model)
    sharded = FrozenPolicy(load_to_train(tmp_path, "float32", where), where, 1.3)
    whole = FrozenPolicy(model, where, 1.3)
    assert is_sharded(sharded.causal_lm)
    for _ in range(2):  # from the second pass on DeepSpeed gathers ahead
        assert torch.equal(sharded.logprobs(batch), whole.logprobs(batch))


def test_capped_logits_are_refused_in_shares(tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=30.0,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="Gemma2ForCausalLM scales or caps its logits"):
        refuse_processed_logits(load_to_train(tmp_path, "float32", SHARDED))

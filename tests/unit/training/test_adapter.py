"""LoRA: the adapter alone is trained, its gradient is the reference's, and what leaves the trainer is a plain model."""

import copy
import importlib.util
import json
from pathlib import Path

import peft
import pytest
import torch
from reference.gradient_case import OPTIMIZER, SPLITS, execution, make_batch, moved, relative_l2, step_of
from reference.lora_case import (
    CASES,
    LAYERS,
    LORA,
    adapted_policy,
    base_model,
    expected_step,
    factors,
    gradients,
    start,
    trained,
    values,
)
from support.refusals import refused
from torch import Tensor

from luffy.config.model import DType, LoRAConfig
from luffy.errors import CheckpointError, ConfigError
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training.checkpoint import CheckpointStore
from luffy.training.model_folder import load_causal_lm
from luffy.training.policy import FrozenPolicy, Policy, UnadaptedPolicy
from luffy.training.policy_model import ADAPTER_FOLDER, Adapter

TOLERANCE = 1e-5


@pytest.mark.parametrize(("split", "temperature"), [*((split, 1.0) for split in SPLITS), ("packed_some_rows", 0.7)])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_the_factors_equals_the_float64_reference_for_any_split(case, split, temperature):
    expected_gradients, expected_factors, _ = expected_step(case, temperature)
    policy = adapted_policy(factors(), temperature=temperature, **SPLITS[split])
    policy.accumulate(make_batch(case, start()), step_of(case))
    assert relative_l2(gradients(policy), expected_gradients) < TOLERANCE
    policy.engine.step()
    assert relative_l2(values(policy), expected_factors) < TOLERANCE
    assert relative_l2(moved(values(policy), factors()), moved(expected_factors, factors())) < 1e-3


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_only_the_adapter_has_gradients_and_optimizer_states(zero_stage: int) -> None:
    policy = adapted_policy(zero_stage=zero_stage)
    for _ in range(2):
        policy.update(make_batch("luffy", base_model()), step_of("luffy"), 1e-2)
    policy.accumulate(make_batch("luffy", base_model()), step_of("luffy"))
    frozen = [one for name, one in policy.causal_lm.named_parameters() if ".lora_" not in name]
    assert len(frozen) == len(dict(base_model().named_parameters()))
    assert all(one.grad is None and not one.requires_grad for one in frozen)
    adamw = policy.engine.optimizer.optimizer if zero_stage else policy.engine.optimizer
    moments = [state["exp_avg"].numel() for state in adamw.state.values()]
    num_factors = sum(tensor.numel() for tensor in factors().values())
    assert num_factors <= sum(moments) < num_factors + 16  # ZeRO pads
    before, after = (dict(model.named_parameters()) for model in (base_model(), policy.causal_lm))
    if zero_stage < 3:
        assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
        for layer in LAYERS:
            assert torch.equal(before[f"{layer}.weight"], after[f"{layer}.base_layer.weight"])


@pytest.mark.parametrize("tie", [False, True])
def test_an_ordinary_model_with_the_same_log_probabilities_is_exported_and_an_adapter_that_peft_reads(tie, tmp_path):
    model, batch = base_model(tie), make_batch("luffy", base_model(tie))
    policy = adapted_policy(factors(), model=model)
    policy.update(batch, step_of("luffy"), 1e-2)
    training = {name: tensor.clone() for name, tensor in policy.causal_lm.state_dict().items()}
    policy.export(tmp_path)
    assert all(torch.equal(tensor, training[name]) for name, tensor in policy.causal_lm.state_dict().items())
    exported = load_causal_lm(tmp_path, "float32")
    assert dict(exported.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert not any(hasattr(module, "lora_A") for module in exported.modules())
    found_BT, expected_BT = (one.logprobs(batch) for one in (_whole(exported), policy))
    assert (found_BT - expected_BT).abs().max() < TOLERANCE
    assert (expected_BT - _whole(model).logprobs(batch)).abs().max() > 0.1
    read = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / ADAPTER_FOLDER)
    with torch.no_grad():
        expected = policy.causal_lm(batch.input_ids_BT).logits
        assert torch.allclose(read(batch.input_ids_BT).logits, expected, atol=1e-6)
    config = json.loads((tmp_path / ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None
    assert config["target_modules"] == sorted(LAYERS)


def _whole(model: torch.nn.Module) -> Policy:
    return Policy(copy.deepcopy(model), OPTIMIZER, execution(), "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_are_the_merged_ones_rounded_once(dtype: DType) -> None:
    policy = adapted_policy(factors(), dtype, zero_stage=2)
    published = dict(policy.weights())
    assert published.keys() == dict(base_model().named_parameters()).keys()
    parameters = values(policy)
    for name, weight in base_model().named_parameters():
        expected = weight.detach().to(getattr(torch, dtype)).float()
        if (layer := name.removesuffix(".weight")) in LAYERS:
            expected = expected + 1.5 * parameters[f"{layer}.lora_B"] @ parameters[f"{layer}.lora_A"]
        half_ulp = {"float32": 2**-23, "bfloat16": 2**-8}[dtype]
        assert torch.allclose(published[name].float(), expected, rtol=half_ulp, atol=1e-7), name
        assert published[name].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_reference_is_the_start_of_the_stage_and_leaves_the_updates_around_it_alone(zero_stage: int) -> None:
    batch, found = make_batch("luffy", start()), []
    expected_BT = FrozenPolicy(copy.deepcopy(base_model()), execution(), 1.0).logprobs(batch)
    for looks_back in (False, True):
        policy = adapted_policy(factors(), zero_stage=zero_stage)
        for _ in range(3):
            if looks_back:
                assert torch.equal(UnadaptedPolicy(policy).logprobs(batch), expected_BT)
                assert (policy.logprobs(batch) - expected_BT).abs().max() > 0.1
            policy.update(batch, step_of("luffy"), 1e-2)
        found.append(values(policy))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert relative_l2(found[0], {name: tensor.double() for name, tensor in factors().items()}) > 1e-4


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_the_embedded_engine_generates_with_the_adapter(zero_stage: int, tmp_path: Path) -> None:
    policy = adapted_policy(factors(), zero_stage=zero_stage)
    policy.export(tmp_path)
    requests = [RolloutRequest((1, 2, token), seed=0) for token in range(3, 9)]

    def greedy(model: torch.nn.Module) -> list[tuple[int, ...]]:
        engine = TransformersEngine(model, batch_size=8)  # type: ignore[arg-type]
        return [tuple(one.token_ids) for one in engine.generate(requests, SamplingParams(0.0, 12, ()))]

    with policy.inference_model() as whole:
        found = greedy(whole)
    assert found == greedy(load_causal_lm(tmp_path, "float32").eval())
    assert found != greedy(copy.deepcopy(base_model()).eval())


@pytest.mark.parametrize(("dtype", "zero_stage"), [("float32", 0), ("float32", 3), ("bfloat16", 2)])
def test_a_checkpoint_holds_the_adapter_alone_and_another_rank_is_refused(dtype, zero_stage, tmp_path: Path) -> None:
    policy, store = adapted_policy(factors(), dtype, zero_stage=zero_stage), CheckpointStore(tmp_path, keep=1)
    policy.update(make_batch("luffy", start()), step_of("luffy"), 1e-2)
    store.save({"policy": policy.engine}, 1)
    num_bytes = sum(path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*.safetensors"))
    num_factors = sum(tensor.numel() for tensor in factors().values())
    assert 12 * num_factors < num_bytes < 14 * num_factors + 16_000  # the rest are names
    other = adapted_policy(lora=LoRAConfig(rank=2, alpha=3.0))
    with pytest.raises(CheckpointError, match=r"policy.*parameters"):
        store.load({"policy": other.engine}, 1)


def test_the_start_depends_on_the_seed_alone_and_changes_nothing() -> None:
    torch.manual_seed(5)
    undisturbed = torch.rand(3)
    torch.manual_seed(5)
    first = values(adapted_policy(seed=1))
    assert torch.equal(torch.rand(3), undisturbed)
    second, other = values(adapted_policy(seed=1)), values(adapted_policy(seed=2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert all(first[name].any() == name.endswith("lora_A") for name in first)
    assert not torch.equal(first[f"{LAYERS[0]}.lora_A"], other[f"{LAYERS[0]}.lora_A"])
    batch = make_batch("luffy", base_model())
    assert torch.equal(adapted_policy(seed=1).logprobs(batch), _whole(base_model()).logprobs(batch))


def test_targets_choose_the_layers() -> None:
    chosen = adapted_policy(lora=LoRAConfig(rank=2, alpha=2.0, targets=("q_proj", "layers.1.mlp.up_proj")))
    layers = {name.rpartition(".lora_")[0] for name in trained(chosen)}
    assert layers == {LAYERS[0], LAYERS[7], "model.layers.1.mlp.up_proj"}
    assert set(LAYERS) == {name.rpartition(".lora_")[0] for name in trained(adapted_policy())}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_porj", "self_attn", "proj"])
def test_a_target_that_is_no_adaptable_layer_is_refused(target: str) -> None:
    lora = LoRAConfig(rank=2, alpha=2.0, targets=("q_proj", target))
    layers = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    with refused(f"model.lora.targets: {target}", layers, error=ConfigError):
        Adapter(copy.deepcopy(base_model()), lora, seed=0)


def test_peft_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refused("model.lora", "peft", "pip install 'luffy-rl[lora]'", error=ConfigError):
        Adapter(copy.deepcopy(base_model()), LORA, seed=0)


def test_dropout_acts_in_updates_and_not_in_log_probabilities() -> None:
    batch, dropped = make_batch("sft", base_model()), LORA.model_copy(update={"dropout": 0.5})
    found: list[dict[str, Tensor]] = []
    for lora in (LORA, dropped, dropped):
        policy = adapted_policy(factors(), lora=lora)
        assert torch.equal(policy.logprobs(batch), adapted_policy(factors()).logprobs(batch))
        torch.manual_seed(0)
        policy.accumulate(batch, step_of("sft"))
        found.append(gradients(policy))
    assert relative_l2(found[1], {name: one.double() for name, one in found[0].items()}) > 0.05
    assert all(torch.equal(found[1][name], found[2][name]) for name in found[1])

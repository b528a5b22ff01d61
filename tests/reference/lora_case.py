"""A LoRA adapter in training, and the same step in float64 by a reference that knows nothing of peft."""

import copy
import functools
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from luffy.config.model import DType, LoRAConfig
from luffy.training.model_folder import load_causal_lm
from luffy.training.policy import FrozenPolicy, Policy, UnadaptedPolicy
from luffy.training.policy_model import Adapter
from reference.gradient_case import (
    OPTIMIZER,
    adamw_step,
    execution,
    gradients_at_step,
    make_batch,
    moved,
    reference_gradients,
    reference_of,
    reference_optimizer,
    relative_l2,
    shard_by_source,
    step_of,
    tiny_model,
    whole,
)

LORA = LoRAConfig(rank=3, alpha=4.5)
SCALE = 1.5
"""alpha / rank."""
LAYERS = [
    f"model.layers.{layer}.{name}"
    for layer in range(2)
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                 "mlp.up_proj", "mlp.down_proj")
]  # fmt: skip
CASES = ("luffy", "reinforce_pp", "sft")
"""Rollouts with demonstrations; with a KL term against the reference; demonstrations alone."""


@functools.cache
def base_model(tie: bool = False) -> PreTrainedModel:
    """The model that the adapter is for; copy it before training."""
    return tiny_model(tie=tie)


def factors(seed: int = 0, model: PreTrainedModel | None = None) -> dict[str, Tensor]:
    """`A` and `B` of every layer; `B` as after some training, since at its start of zero `A` has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    modules = dict((model or base_model()).named_modules())
    found = {}
    for layer in LAYERS:
        num_outputs, num_inputs = modules[layer].weight.shape
        found[f"{layer}.lora_A"] = 0.3 * torch.randn(LORA.rank, num_inputs, generator=generator)
        found[f"{layer}.lora_B"] = 0.1 * torch.randn(num_outputs, LORA.rank, generator=generator)
    return found


class AdaptedReference(nn.Module):
    """The base model with `W + alpha / rank B A` in place of each weight; its parameters are `A` and `B` alone."""

    def __init__(self, dtype: torch.dtype, given: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._base = (copy.deepcopy(base_model()).to(dtype).requires_grad_(False),)  # hidden from torch
        self._named = {name: nn.Parameter(tensor.to(dtype)) for name, tensor in given.items()}
        for name, parameter in self._named.items():
            self.register_parameter(name.replace(".", "/"), parameter)

    def named_parameters(self, *_: object, **__: object):  # type: ignore[no-untyped-def]
        return iter(self._named.items())

    def merged(self) -> dict[str, Tensor]:
        """Every weight of the model, the adapted ones merged."""
        weights = dict(self._base[0].named_parameters())
        for layer in LAYERS:
            product = self._named[f"{layer}.lora_B"] @ self._named[f"{layer}.lora_A"]
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + SCALE * product
        return weights

    def forward(self, **inputs: object) -> object:
        return functional_call(self._base[0], self.merged(), args=(), kwargs=inputs)


@functools.cache
def start() -> AdaptedReference:
    """The adapted policy before the step, in float32: what the constants of the step are made from."""
    return AdaptedReference(torch.float32, factors())


@functools.cache
def expected_step(
    case: str, temperature: float = 1.0
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the factors, the factors after one AdamW step, and all merged weights after it, in float64."""
    model64 = AdaptedReference(torch.float64, factors())
    gradients = reference_gradients(case, model64, start(), reference_of(case), temperature)  # type: ignore[arg-type]
    adamw_step(model64, reference_optimizer(model64))
    after = {name: parameter.detach().clone() for name, parameter in model64.named_parameters()}
    return gradients, after, {name: weight.detach().clone() for name, weight in model64.merged().items()}


def adapted_policy(
    given: Mapping[str, Tensor] | None = None,
    dtype: DType = "float32",
    temperature: float = 1.0,
    lora: LoRAConfig = LORA,
    seed: int = 0,
    model: PreTrainedModel | None = None,
    **settings: object,
) -> Policy:
    """A policy with an adapter whose factors are `given` (those of `seed` without)."""
    model = copy.deepcopy(model or base_model()).to(getattr(torch, dtype))
    adapter = Adapter(model, lora, seed)
    parameters = dict(model.named_parameters())
    for name, tensor in (given or {}).items():
        parameters[f"{name}.default.weight"].data.copy_(tensor)
    return Policy(model, OPTIMIZER, execution(**settings), dtype, temperature, adapter)


def trained(policy: Policy) -> dict[str, nn.Parameter]:
    """The trained parameters under the names of the reference."""
    return {
        name.removesuffix(".default.weight"): parameter
        for name, parameter in policy.causal_lm.named_parameters()
        if parameter.requires_grad
    }


def values(policy: Policy) -> dict[str, Tensor]:
    """The trained parameters, whole on every rank."""
    return {name: tensor.float() for name, tensor in whole(trained(policy)).items()}


def gradients(policy: Policy) -> dict[str, Tensor]:
    """The accumulated gradients of the factors."""
    return {name: safe_get_full_grad(parameter).clone() for name, parameter in trained(policy).items()}


def errors_of_step(case: str, folder: Path, **settings: object) -> dict[str, float]:
    """Relative L2 of one step on this rank's share of the rows, and of what is exported to `folder` after it.

    `reference`: largest difference between log-probabilities without the adapter and those of the base model.
    """
    expected_gradients, expected_factors, expected_weights = expected_step(case)
    policy = adapted_policy(factors(), **settings)
    share = make_batch(case, start())
    if dist.get_world_size() > 1:
        share = shard_by_source(share, dist.get_rank())
    policy.accumulate(share, step_of(case))
    found = gradients_at_step(policy.engine, trained(policy))
    policy.engine.step()
    after = values(policy)
    unadapted_BT = UnadaptedPolicy(policy).logprobs(share)
    base_BT = FrozenPolicy(copy.deepcopy(base_model()), execution(**settings), 1.0).logprobs(share)
    policy.export(folder)
    dist.barrier()
    exported = dict(load_causal_lm(folder, "float32").named_parameters())
    dist.barrier()
    return {
        "gradient": relative_l2(found, expected_gradients),
        "movement": relative_l2(moved(after, factors()), moved(expected_factors, factors())),
        "exported": relative_l2(exported, expected_weights),
        "reference": float((unadapted_BT - base_BT).abs().max()),
    }

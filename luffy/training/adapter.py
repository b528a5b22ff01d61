"""LoRA by peft: an adapter on a policy's linear layers, trained while the weights stay frozen.

Method: Hu et al., arXiv 2106.09685, section 4.1. A layer computes `W x + alpha / rank B A x`; `A` starts random, `B` at
zero. Weights leave the trainer merged, `W + alpha / rank B A`, one at a time and as copies, so that engines, evaluation
and the next stage see an ordinary model and the weights in training never change.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from luffy.config.model import LoRAConfig
from luffy.errors import ConfigError
from luffy.model_shape import missing_package
from luffy.training.model_folder import FolderWeight, own_weight

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as AdaptedLinear

ADAPTER_FOLDER = "adapter"
"""Folder in an exported model with the adapter alone, in peft's format, for the model that the stage started from."""
_NAME = "default"
"""Name of the adapter within peft's layers."""


class Adapter:
    """The LoRA adapter of a policy, and the only part of it that is trained.

    Modifies `causal_lm` in place: freezes its weights and wraps its layers. The random start of `A` depends on `seed`
    alone. Raises ConfigError when peft is not installed, or for targets that are not linear layers of the model.
    """

    def __init__(self, causal_lm: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
        if (missing := missing_package()) is not None:
            raise ConfigError(missing)
        import peft  # an optional dependency, and slow to import
        from peft.tuners.lora import Linear as AdaptedLinear

        # The output embeddings stay out: `LogProbHead` reads their weight directly and would bypass an adapter.
        head, modules = causal_lm.get_output_embeddings(), causal_lm.named_modules()
        complaint = config.complaint([name for name, one in modules if isinstance(one, nn.Linear) and one is not head])
        if complaint is not None:
            raise ConfigError(complaint)
        wanted = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,  # type: ignore[arg-type] # peft divides it by the rank, whatever number it is
            target_modules="all-linear" if config.targets is None else list(config.targets),
            lora_dropout=config.dropout,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            # In the type of the weights, as in full training: with bfloat16 the optimizer keeps float32 masters.
            self._peft_model = peft.get_peft_model(causal_lm, wanted, _NAME, autocast_adapter_dtype=False)
        self._causal_lm = causal_lm
        self._layers: dict[str, AdaptedLinear] = {
            name: module for name, module in causal_lm.named_modules() if isinstance(module, AdaptedLinear)
        }
        trained = {name: weight for name, weight in causal_lm.named_parameters() if weight.requires_grad}
        self._factors = list(trained)
        self._num_parameters = sum(weight.numel() for weight in trained.values())  # before ZeRO 3 takes them apart

    @property
    def num_parameters(self) -> int:
        """Number of weights that are trained."""
        return self._num_parameters

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within the context the model computes without the adapter; take no gradient in it."""
        with self._peft_model.disable_adapter():
            yield

    def factors(self) -> Iterator[FolderWeight]:
        """`A` and `B` of every adapted layer, by their names in a folder of peft."""
        parameters = dict(self._causal_lm.named_parameters())
        for name in self._factors:
            in_peft = f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"
            yield own_weight(in_peft, parameters[name])

    def merged_weights(self) -> Iterator[FolderWeight]:
        """Every weight of the model folder, with the adapter merged into those of adapted layers.

        A tied output head is not included.
        """
        factors = frozenset(self._factors)
        for name, parameter in self._causal_lm.named_parameters():
            if name in factors:
                continue
            module, _, kind = name.rpartition(".")
            layer = self._layers.get(module.removesuffix(_WRAPPED))
            if layer is None:
                yield own_weight(name, parameter)
            elif kind == "weight":
                yield _merged(f"{module.removesuffix(_WRAPPED)}.weight", parameter, layer)
            else:  # a bias, which has no adapter
                yield own_weight(f"{module.removesuffix(_WRAPPED)}.{kind}", parameter)

    def save(self, factors: Mapping[str, Tensor], folder: Path) -> None:
        """Write peft's folder of the adapter; `factors` are the values of `factors()`, on the CPU."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(factors), folder / "adapter_model.safetensors", {"format": "pt"})
        config = self._peft_model.peft_config[_NAME].to_dict()
        # The folder is part of a stage's result, which must not depend on the path of the base model.
        config |= {"base_model_name_or_path": None, "inference_mode": True}
        text = json.dumps(config, indent=2, sort_keys=True, default=sorted)  # sets of module names
        (folder / "adapter_config.json").write_text(text + "\n", encoding="utf-8")


_WRAPPED = ".base_layer"
"""Where peft keeps the layer that it has wrapped."""


def _merged(name: str, weight: nn.Parameter, layer: "AdaptedLinear") -> FolderWeight:
    factor_a, factor_b = (factors[_NAME].get_parameter("weight") for factors in (layer.lora_A, layer.lora_B))

    @torch.no_grad()
    def value() -> Tensor:
        # In float32, where peft's own function rounds the product to the weight's type before it adds it.
        product = layer.scaling[_NAME] * (factor_b.float() @ factor_a.float())
        # GPT-2 keeps its weights transposed.
        return (weight.float() + (product.T if layer.fan_in_fan_out else product)).to(weight.dtype)

    return FolderWeight(name, (weight, factor_a, factor_b), value)

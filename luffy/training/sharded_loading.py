"""Loading of models for training; under ZeRO 3 each rank loads only its share.

Under ZeRO 3 the model is built in `deepspeed.zero.Init`, which shards the parameters of each module as soon as the
module exists. Each rank then reads its own shares from the memory-mapped safetensors files. A rank's peak memory is its
share and the parameters of the largest module.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME

from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType
from luffy.training.deepspeed_engine import building_in_shares
from luffy.training.policy import load_causal_lm

logger = logging.getLogger(__name__)


def load_to_train(folder: Path, dtype: DType, execution: ExecutionConfig) -> PreTrainedModel:
    """The model in a Hugging Face folder; under ZeRO 3 in shares, a collective call.

    A folder whose weights are stored differently from the model's parameters (transformers fuses the experts of some
    MoE models) is loaded whole on every rank. The engine of a trained model then shards it; a frozen one stays whole.
    """
    if execution.zero_stage < 3:
        return load_causal_lm(folder, dtype)
    stored = _StoredWeights.of(folder)
    with torch.device("meta"):
        outline = _empty_model(folder, dtype)
    if not _has_all(stored, outline):
        logger.warning("%s is loaded whole on every rank: its weights are not stored as the model has them", folder)
        return load_causal_lm(folder, dtype)
    with building_in_shares(dtype, execution), no_init_weights():
        causal_lm = _empty_model(folder, dtype)
    causal_lm.tie_weights()
    for name, parameter in causal_lm.named_parameters():
        _fill(parameter, stored.read(name))
    if causal_lm.can_generate() and (folder / GENERATION_CONFIG_NAME).exists():
        causal_lm.generation_config = GenerationConfig.from_pretrained(folder)
    return causal_lm


def _empty_model(folder: Path, dtype: DType) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation="sdpa", trust_remote_code=False
    )


@dataclass(frozen=True, slots=True)
class _StoredWeights:
    """The tensors in the safetensors files of a model folder."""

    files: Mapping[str, Path]
    """The file of each tensor."""

    @classmethod
    def of(cls, folder: Path) -> "_StoredWeights":
        """The tensors in the folder's index, or in its only file; none without either."""
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return cls({name: folder / file for name, file in named.items()})
        if not single.is_file():
            return cls({})
        with safe_open(single, "pt") as file:
            return cls(dict.fromkeys(file.keys(), single))

    def shape(self, name: str) -> list[int] | None:
        """Shape of the tensor; None without a tensor of that name."""
        if name not in self.files:
            return None
        with safe_open(self.files[name], "pt") as file:
            return list(file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """The tensor, memory-mapped: only the parts that are used are read from disk."""
        with safe_open(self.files[name], "pt") as file:
            return file.get_tensor(name)


def _has_all(stored: _StoredWeights, outline: PreTrainedModel) -> bool:
    """Whether every parameter is stored under its own name, as it is, and there is nothing else to load."""
    parameters = dict(outline.named_parameters(remove_duplicate=False))
    return (
        outline.state_dict().keys() <= parameters.keys()  # no buffer is stored
        and not outline._keep_in_fp32_modules_strict
        and not any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(outline))
        and all(stored.shape(name) == list(weight.shape) for name, weight in outline.named_parameters())
    )


@torch.no_grad()
def _fill(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy this rank's share of a parameter; DeepSpeed leaves padding after the end of the last one."""
    share: Tensor = vars(parameter)["ds_tensor"]
    mine = whole.view(-1)[dist.get_rank() * share.numel() :][: share.numel()]
    share.narrow(0, 0, mine.numel()).copy_(mine)

"""Loading of models for training; under ZeRO 3 each rank loads only its share.

Under ZeRO 3 the model is built in `deepspeed.zero.Init`, which shards the parameters of each module as soon as the
module exists. Each rank then reads its own shares from the memory-mapped safetensors files. A rank's peak memory is its
share and the parameters of the largest module.
"""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME

from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType
from luffy.training.deepspeed_engine import building_in_shares
from luffy.training.model_folder import load_causal_lm
from luffy.training.stored_weights import StoredWeights, empty_model

logger = logging.getLogger(__name__)


def load_to_train(folder: Path, dtype: DType, execution: ExecutionConfig) -> PreTrainedModel:
    """The model in a Hugging Face folder; under ZeRO 3 in shares, a collective call.

    A folder whose weights are stored differently from the model's parameters (transformers fuses the experts of some
    MoE models) is loaded whole on every rank. The engine of a trained model then shards it; a frozen one stays whole.
    """
    if execution.zero_stage < 3:
        return load_causal_lm(folder, dtype)
    stored = StoredWeights.of(folder)
    with torch.device("meta"):
        outline = empty_model(folder, dtype)
    if not _has_all(stored, outline):
        logger.warning("%s is loaded whole on every rank: its weights are not stored as the model has them", folder)
        return load_causal_lm(folder, dtype)
    with building_in_shares(dtype, execution), no_init_weights():
        causal_lm = empty_model(folder, dtype)
    causal_lm.tie_weights()
    for name, parameter in causal_lm.named_parameters():
        _fill(parameter, stored.read(name))
    if causal_lm.can_generate() and (folder / GENERATION_CONFIG_NAME).exists():
        causal_lm.generation_config = GenerationConfig.from_pretrained(folder)
    return causal_lm


def _has_all(stored: StoredWeights, outline: PreTrainedModel) -> bool:
    """Whether every parameter is stored under its own name, as it is, and there is nothing else to load."""
    parameters, shapes = dict(outline.named_parameters(remove_duplicate=False)), stored.shapes
    return (
        outline.state_dict().keys() <= parameters.keys()  # no buffer is stored
        and not outline._keep_in_fp32_modules_strict
        and not any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(outline))
        and all(shapes.get(name) == list(weight.shape) for name, weight in outline.named_parameters())
    )


@torch.no_grad()
def _fill(parameter: nn.Parameter, whole: Tensor) -> None:
    """Copy this rank's share of a parameter; DeepSpeed leaves padding after the end of the last one."""
    share: Tensor = vars(parameter)["ds_tensor"]
    mine = whole.view(-1)[dist.get_rank() * share.numel() :][: share.numel()]
    share.narrow(0, 0, mine.numel()).copy_(mine)

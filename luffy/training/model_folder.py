"""Weights of a model in training under the names of its folder, and the folder that they are written to."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class FolderWeight:
    """A weight of a model folder, computed from parameters of the model in training."""

    name: str
    """Its name in the folder."""
    parameters: tuple[nn.Parameter, ...]
    """What it is computed from; under ZeRO 3 they are sharded until they are gathered."""
    value: Callable[[], Tensor]
    """The weight, computed while `parameters` are whole; may share their memory."""


def own_weight(name: str, parameter: nn.Parameter) -> FolderWeight:
    """A parameter as it is."""
    return FolderWeight(name, (parameter,), parameter.detach)


def own_weights(causal_lm: PreTrainedModel) -> Iterator[FolderWeight]:
    """Every parameter of a model without an adapter. A tied output head is not included."""
    return (own_weight(name, parameter) for name, parameter in causal_lm.named_parameters())


def write_model_folder(causal_lm: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a plain Hugging Face folder (safetensors): `weights`, the buffers and configurations of `causal_lm`."""
    persistent = causal_lm.state_dict().keys()
    buffers = {name: buffer.detach().cpu().clone() for name, buffer in causal_lm.named_buffers()}
    kept = {name: buffer for name, buffer in buffers.items() if name in persistent}
    causal_lm.save_pretrained(folder, state_dict={**weights, **kept})

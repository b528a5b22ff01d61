"""The safetensors files of a model folder: their tensors, and whether these are what its config.json needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from luffy.config.model import DType
from luffy.errors import DataError
from luffy.json_text import parse_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_AGAIN = "download the model again, or ask whoever made it"


@dataclass(frozen=True)
class StoredWeights:
    """The tensors in the safetensors files of a model folder, by transformers' names of these files.

    `setting` is where the folder is configured, for errors.
    """

    folder: Path
    shards: tuple[str, ...]
    """Names of the files."""
    setting: str

    @classmethod
    def of(cls, folder: Path, setting: str = "model.path") -> "StoredWeights":
        """Those in the folder's only file, or in the files of its index; none of them is opened.

        Raises DataError without either, and for an index that names a file which is not in the folder.
        """
        if (folder / SINGLE_FILE).is_file():
            return cls(folder, (SINGLE_FILE,), setting)
        index = folder / INDEX_FILE
        if not index.is_file():
            raise DataError(f"{setting}: {folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
        try:
            shards = sorted(set(map(str, parse_json(index.read_bytes())["weight_map"].values())))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{setting}: {index} is no index of weights ({error}); {_AGAIN}") from None
        for name in shards:
            if Path(name).name != name or not (folder / name).is_file():
                raise DataError(f"{setting}: {index} names {name!r}, which is no file of the folder; {_AGAIN}")
        return cls(folder, tuple(shards), setting)

    @cached_property
    def _tensors(self) -> Mapping[str, tuple[Path, list[int]]]:
        found: dict[str, tuple[Path, list[int]]] = {}
        for path in (self.folder / shard for shard in self.shards):
            try:
                with safe_open(path, "pt") as file:
                    found |= {name: (path, list(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError, ValueError) as error:
                raise DataError(
                    f"{self.setting}: {path} ({path.stat().st_size} bytes) is no whole safetensors file ({error}); "
                    f"{_AGAIN}"
                ) from None
        return found

    @property
    def shapes(self) -> Mapping[str, list[int]]:
        """Shape of each tensor, from the headers; DataError for a file that is no whole safetensors file."""
        return {name: shape for name, (_, shape) in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """The tensor, memory-mapped: only the parts that are used are read from disk."""
        with safe_open(self._tensors[name][0], "pt") as file:
            return file.get_tensor(name)

    def check(self, config: Path) -> None:
        """Raise DataError unless these are the weights of the model that the folder `config` describes.

        Every weight has to be there in its shape, under the names that transformers reads. Nothing but headers is read.
        Kinds of models that transformers does not have as causal language models, and quantised ones, are only opened.
        """
        text = (config / "config.json").read_text(encoding="utf-8")
        num_layers = _largest(parse_json(text), "num_hidden_layers")
        if num_layers > len(self.shapes):
            raise DataError(
                f"{self.setting}: {self.folder}: config.json has {num_layers} layers, and the weights are only "
                f"{len(self.shapes)} tensors; {_AGAIN}"
            )
        try:
            outline = _outline(config)
            lacking, misshapen = ([], []) if outline is None else _unfit(outline, self.shapes)
        except Exception as error:  # noqa: BLE001 - a configuration with senseless values raises anything in transformers
            reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
            raise DataError(
                f"{self.setting}: {self.folder}: config.json describes no model that can be built ({reason})"
            ) from None
        if lacking:
            raise DataError(
                f"{self.setting}: {self.folder}: {len(lacking)} of the weights that config.json needs are missing, the "
                f"first is {lacking[0]}; {_AGAIN}"
            )
        if misshapen:
            name, found, wanted = misshapen[0]
            raise DataError(
                f"{self.setting}: {self.folder}: {name} has the shape {list(found)}, and config.json needs "
                f"{list(wanted)} (one of {len(misshapen)} that differ); {_AGAIN}"
            )


def empty_model(folder: Path, dtype: DType) -> PreTrainedModel:
    """The model in the config.json of `folder`, on the current device, without its weights."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, dtype), attn_implementation="sdpa", trust_remote_code=False
    )


def _outline(folder: Path) -> PreTrainedModel | None:
    """The model without memory for its weights; None where transformers cannot tell which ones it has."""
    kind = parse_json((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "quantization_config"):
        return None
    with torch.device("meta"):
        return empty_model(folder, "float32")


def _unfit(
    outline: PreTrainedModel, shapes: Mapping[str, list[int]]
) -> tuple[list[str], list[tuple[str, torch.Size, torch.Size]]]:
    """Names of the weights that are missing; name, shape and needed shape of those of another shape.

    transformers loads tensors without memory, so that renamed, fused and tied weights count as when it loads them.
    """
    device = torch.device("meta")
    steps = cast(Any, get_model_conversion_mapping(outline))
    found = convert_and_load_state_dict_in_model(
        model=outline,
        state_dict={name: torch.empty(shape, device=device) for name, shape in shapes.items()},
        load_config=LoadStateDictConfig(device_map={"": device}, weight_mapping=steps, dtype=torch.float32),
        disk_offload_index=None,
    )[0]
    outline.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
    outline._adjust_missing_and_unexpected_keys(found)
    # What cannot be fused lacks one of its parts, or has one of another shape.
    return sorted(found.missing_keys | found.conversion_errors.keys()), sorted(found.mismatched_keys)


def _largest(config: object, name: str) -> int:
    """The largest whole number under that key, in sections of the configuration too; 0 without one."""
    if not isinstance(config, Mapping):
        return 0
    values = [config.get(name, 0), *(_largest(each, name) for each in config.values())]
    return max(value for value in values if isinstance(value, int))

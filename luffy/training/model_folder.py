"""Model folders: the starting policy, loading, and writing a model in training under the names of its folder.

The starting policy is a tiny Qwen2 from scratch, an adapted model folder, or a dequantised GGUF file. `StoredWeights`
checks that a folder's safetensors files are what its config.json needs.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from luffy.config.model import (
    GGUF,
    DType,
    ModelConfig,
    TinyArchitecture,
    copy_model_files,
    locate,
    model_files,
    refuse_code,
)
from luffy.errors import DataError, first_line
from luffy.files import clone_or_copy, link_or_copy, refuse_special
from luffy.json_text import parse_json
from luffy.model_shape import num_embeddings

_OF_TOKENIZER = "tokenizer*", "vocab*", "*.txt", "*.model", "*.jinja", "special_tokens_map.json", "added_tokens.json"
_LEFT_OUT = (*_OF_TOKENIZER, "chat_template*", "generation_config.json", "config.json", ".*")
"""Files of the tokenizer, which `prepare_data` writes, and what is adapted."""
_BLOBS, _CACHED_MODEL = "blobs", "models--"


def new_tiny_model(architecture: TinyArchitecture, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A randomly initialised Qwen2 in float32 with untied embeddings over the tokenizer's vocabulary."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_hidden_layers=architecture.num_layers,
        num_attention_heads=architecture.num_heads,
        num_key_value_heads=architecture.num_heads,
        max_position_embeddings=architecture.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": architecture.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def model_folder(source: str, setting: str) -> Path:
    """The folder of a local path or hub id, which is downloaded; nothing is changed in it.

    Raises DataError, naming `setting`, where it holds no whole model.
    """
    here = locate(source)
    folder = Path(here).expanduser()
    if not folder.is_dir():
        folder = Path(snapshot_download(here, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    _refuse_unusable(folder, setting)
    StoredWeights.of(folder, setting).check(folder)
    return folder


def _refuse_unusable(folder: Path, setting: str) -> dict[str, Path]:
    """The files of a model folder; DataError for one that is no model's, exists as code, or leads out of itself."""
    files = model_files(folder, setting)
    if "config.json" not in files:
        raise DataError(f"{setting}: {folder} has no config.json; give a Hugging Face model folder or a hub id")
    if "adapter_config.json" in files:
        raise DataError(
            f"{setting}: {folder} holds an adapter (adapter_config.json), which would not be loaded; give a folder "
            "with the adapter merged into the model, or remove its adapter_* files"
        )
    refuse_code(folder, setting)
    return files


def adapt_model_folder(model: ModelConfig, out: Path, ends: Sequence[int] = ()) -> None:
    """Copy the folder (or hub snapshot) of `model` to `out` with its configuration adapted, weights untouched.

    Weights in the hub's cache are linked. The tokenizer is left out, since `prepare_data` writes an adapted one. So is
    `generation_config.json`: only the experiment's settings decide how text is sampled. `ends` are the tokens that
    end a response; several are named in the configuration, and so by exported models. A GGUF file is dequantised first.
    """
    assert model.source is not None
    here = locate(model.source)
    if here.endswith(GGUF):
        folder = out.with_name("dequantised")
        dequantise(Path(here), folder)
        _adapt_folder(folder, model, out, ends, link_or_copy)  # nobody else knows this folder
        shutil.rmtree(folder)
        return
    source = Path(here)
    if not source.is_dir():
        source = Path(snapshot_download(here, allow_patterns=["*.json", "*.safetensors"]))
    _adapt_folder(source, model, out, ends, _put)


def dequantise(file: Path, out: Path) -> None:
    """Write the weights of a GGUF file to `out` as a Hugging Face folder in float32.

    transformers refuses to save a model loaded from a GGUF file, so the weights are copied into a new model with the
    same configuration. Raises DataError for a file that is not whole, or lacks weights of its model.
    """
    try:
        refuse_special(file)
        found = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
        read, loaded = cast(Any, found)  # its annotation knows the model alone
    except ImportError as error:
        raise DataError(f"model.path: a {GGUF} file needs `pip install 'luffy-rl[gguf]'` ({error})") from None
    except Exception as error:  # noqa: BLE001 - a file that is no model raises anything in transformers and gguf
        reason = first_line(error)
        raise DataError(f"model.path: {file} is no whole {GGUF} file ({reason}); download it again") from None
    if lacking := sorted(loaded["missing_keys"]):
        raise DataError(f"model.path: {file} lacks {len(lacking)} weights of its model, the first is {lacking[0]}")
    config = type(read.config).from_dict(
        {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    )
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(out)


def _adapt_folder(
    source: Path, model: ModelConfig, out: Path, ends: Sequence[int], put: Callable[[str, str], str]
) -> None:
    files = _refuse_unusable(source, "model.path")
    try:
        config = parse_json(files["config.json"].read_bytes())
    except ValueError as error:
        raise DataError(f"model.path: {files['config.json']} is not JSON ({error}); download the model again") from None
    if not isinstance(config, dict):
        found = type(config).__name__
        raise DataError(f"model.path: {files['config.json']} has to be a JSON object, found {found}")
    config.pop("auto_map", None)  # names code of the folder, which is not copied
    if len(ends) > 1:
        config["eos_token_id"] = list(ends)
    padding, rows = config.get("pad_token_id"), num_embeddings(config)
    if padding is not None and rows is not None and padding >= rows:
        config["pad_token_id"] = None  # torch refuses embeddings that lack it; the tokenizer decides what padding is
    if model.max_position_embeddings is not None:
        config["max_position_embeddings"] = model.max_position_embeddings
        config["sliding_window"] = None
    if model.rope_theta is not None:
        # transformers 5 nests it, for some models by the kind of layer; older folders have it at the top level.
        rope = config.get("rope_parameters") or {}
        by_layer = [each for each in rope.values() if isinstance(each, dict)]
        for where in by_layer or [rope or config]:
            where["rope_theta"] = model.rope_theta
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights = StoredWeights.of(source)
    weights.check(out)
    left_out = {name for name in files if name.endswith(".safetensors")} - set(weights.shards)
    left_out |= {INDEX_FILE} if weights.shards == (SINGLE_FILE,) else set()
    for name, file in files.items():
        is_other = "/" in name or any(fnmatchcase(name, pattern) for pattern in _LEFT_OUT)
        if not is_other and name not in left_out:
            put(str(file), str(out / name))


def _put(source: str, target: str) -> str:
    """Link a file of the hub's cache, whose name is the hash of its content; copy any other.

    A user may write the next model into the same file, and would change the finished result through a link.
    """
    store = Path(source).resolve().parent
    is_blob = store.name == _BLOBS and store.parent.name.startswith(_CACHED_MODEL)
    return link_or_copy(source, target) if is_blob else clone_or_copy(source, target)


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy the tokenizer of `prepare_data` into a model folder."""
    copy_model_files(source, out, "the tokenizer")


def load_causal_lm(folder: Path | str, dtype: DType) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False
    )


@dataclass(frozen=True, slots=True)
class FolderWeight:
    """A weight of a model folder, computed from parameters of the model in training."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    """What it is computed from; under ZeRO 3 they are sharded until they are gathered."""
    value: Callable[[], Tensor]
    """The weight, computed while `parameters` are whole; may share their memory."""


def own_weight(name: str, parameter: nn.Parameter) -> FolderWeight:
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

        Every weight has to be there in its shape, under the names that transformers reads. Only headers are read, and
        an output head that is stored although it is tied: another one than the embeddings would be lost in export.
        Kinds of models that transformers does not have as causal language models, and quantised ones, are only opened.
        """
        text = (config / "config.json").read_text(encoding="utf-8")
        num_layers = _largest(parse_json(text), "num_hidden_layers")
        if num_layers > len(self.shapes):
            raise DataError(
                f"{self.setting}: {self.folder}: config.json has {num_layers} layers, and the weights are only "
                f"{len(self.shapes)} tensors; {_AGAIN}"
            )
        lacking: list[str] = []
        misshapen: list[tuple[str, torch.Size, torch.Size]] = []
        tied: dict[str, str] = {}
        try:
            # Transformers cannot tell which weights other kinds have.
            if parse_json(text).get("model_type") in CONFIG_MAPPING:
                loaded = AutoConfig.from_pretrained(config, trust_remote_code=False)
                if type(loaded) in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(loaded, "quantization_config"):
                    with torch.device("meta"):
                        outline = empty_model(config, "float32")
                    tied = dict(outline.all_tied_weights_keys)
                    lacking, misshapen = _unfit(outline, self.shapes)
        except Exception as error:  # noqa: BLE001 - a configuration with senseless values raises anything in transformers
            reason = first_line(error)
            raise DataError(
                f"{self.setting}: {self.folder}: config.json describes no model that can be built ({reason})"
            ) from None
        if lacking:
            raise DataError(
                f"{self.setting}: {self.folder}: {len(lacking)} of the weights that config.json needs are missing, the "
                f"first is {lacking[0]}; {_AGAIN}"
            )
        for head, embeddings in tied.items():
            both = {head, embeddings} <= self.shapes.keys() and self.shapes[head] == self.shapes[embeddings]
            if both and not torch.equal(self.read(head), self.read(embeddings)):
                raise DataError(
                    f"{self.setting}: {self.folder}: config.json ties {head} to {embeddings} (tie_word_embeddings), "
                    "and they are two different ones; set it to false, or remove the one that is not used"
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

"""Model folders: the starting policy, loading, and writing a model in training under the names of its folder.

The starting policy is a tiny Qwen2 from scratch, an adapted model folder, or a dequantised GGUF file.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

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
from luffy.errors import DataError
from luffy.files import clone_or_copy, link_or_copy, refuse_special
from luffy.json_text import parse_json
from luffy.model_shape import num_embeddings
from luffy.training.stored_weights import INDEX_FILE, SINGLE_FILE, StoredWeights

_LEFT_OUT = (
    "tokenizer*",
    "vocab*",
    "*.txt",
    "*.model",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "config.json",
    ".*",
)
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
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
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
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps(_adapt(config, model, ends), indent=2), encoding="utf-8")
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


def _adapt(config: dict[str, Any], model: ModelConfig, ends: Sequence[int]) -> dict[str, Any]:
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
    return config


def load_causal_lm(folder: Path | str, dtype: DType) -> PreTrainedModel:
    """The model in a Hugging Face folder (or hub id)."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", use_safetensors=True, trust_remote_code=False
    )


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

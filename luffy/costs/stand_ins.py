"""Made-up data and a policy with random weights, for a bench of an experiment whose own are not available.

Run: python -m luffy.costs.stand_ins FOLDER

FOLDER/ask.json says what is wanted (`StandIns`). What is written looks like the results of `prepare_data` and `base`:
FOLDER/data/ and FOLDER/base/.
"""

import json
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from luffy.config.evaluation import VALIDATION
from luffy.config.model import TinyArchitecture
from luffy.pipeline.machine.architecture import ModelArchitecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ASK_FILE = "ask.json"
DATA, BASE = "data", "base"
PROGRAM = "luffy.costs.stand_ins"
_TEMPLATE_TOKENS = 2
"""Tokens that the plain chat template adds to a prompt."""
_SHORTEST = 12


@dataclass(frozen=True, slots=True)
class StandIns:
    """The request: which data and policy to make."""

    seed: int
    dtype: str
    data: str | None = None
    """Folder of prepared data, for its tokenizer; None: data is to be made, too."""
    tiny: TinyArchitecture | None = None
    shape: ModelArchitecture | None = None
    """One of `tiny` and `shape`; neither: the policy is at hand."""
    context: int = 0
    """Positions of the model."""
    num_prompts: int = 0
    prompt_tokens: int = 0
    trace_tokens: int = 0
    suites: tuple[str, ...] = field(default_factory=tuple)


def write_ask(folder: Path, wanted: StandIns) -> None:
    """Put the request into `folder`."""
    values = asdict(wanted) | {"tiny": None if wanted.tiny is None else wanted.tiny.model_dump(mode="json")}
    (folder / ASK_FILE).write_text(json.dumps(values), encoding="utf-8")


def make(folder: Path) -> None:
    """Make what `FOLDER/ask.json` wants."""
    values = json.loads((folder / ASK_FILE).read_text(encoding="utf-8"))
    tiny = values["tiny"] and TinyArchitecture.model_validate_json(json.dumps(values["tiny"]))
    shape = values["shape"] and ModelArchitecture(**values["shape"])
    wanted = StandIns(**values | {"tiny": tiny, "shape": shape, "suites": tuple(values["suites"])})
    if wanted.data is None:
        _make_data(folder / DATA, wanted)
    if wanted.tiny is not None or wanted.shape is not None:
        _make_base(folder, wanted)


def _make_data(folder: Path, wanted: StandIns) -> None:
    from luffy.data.parquet import write_prompts
    from luffy.data.tokenizer import build_tokenizer, save_tokenizer
    from luffy.types import Message, Prompt, Trace

    def prompt(source: str, number: int) -> Prompt:
        # Every digit is a token of its own.
        text = f"{number:0{max(_SHORTEST, wanted.prompt_tokens) - _TEMPLATE_TOKENS}d}"
        trace = Trace("7" * (wanted.trace_tokens - 1), "bench", verified=True)
        return Prompt(f"{source}-{number}", source, (Message("user", text),), "7", (trace,))

    rows = [prompt("train", number) for number in range(wanted.num_prompts)]
    (folder / "suites").mkdir(parents=True)
    for name in ("train", "sft", "rl_complement", "corpus", VALIDATION):
        write_prompts(folder / f"{name}.parquet", rows)
    for suite in wanted.suites:
        write_prompts(folder / "suites" / f"{suite}.parquet", [prompt(suite, number) for number in range(len(rows))])
    card: dict[str, object] = {"sources": {f"suites.{suite}": {} for suite in wanted.suites}}
    (folder / "card.json").write_text(json.dumps(card), encoding="utf-8")
    save_tokenizer(build_tokenizer(["0123456789\n"]), folder / "tokenizer")


def _make_base(folder: Path, wanted: StandIns) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from luffy.data.templates import load_tokenizer
    from luffy.training.model_folder import new_tiny_model

    tokens = (folder / DATA if wanted.data is None else Path(wanted.data)) / "tokenizer"
    model = folder / BASE / "model"
    if wanted.tiny is not None:
        new_tiny_model(wanted.tiny, load_tokenizer(tokens), wanted.seed).save_pretrained(model)
    else:
        assert wanted.shape is not None
        torch.manual_seed(wanted.seed)
        config = _config(wanted.shape, wanted.context)
        fresh = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, wanted.dtype), trust_remote_code=False)
        fresh.save_pretrained(model)
    shutil.copytree(tokens, model, dirs_exist_ok=True)


def _config(shape: ModelArchitecture, context: int) -> "PretrainedConfig":
    """A Qwen of that shape; a Llama's differs from it in biases and norms alone, which cost next to nothing."""
    from transformers import Qwen2Config, Qwen3Config

    sizes: dict[str, object] = {
        "vocab_size": shape.vocabulary_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": shape.tied,
    }
    if shape.head_norms or shape.attention_size != shape.hidden_size:  # a Qwen2 has no other size of heads
        return Qwen3Config.from_dict({**sizes, "head_dim": shape.head_size})
    return Qwen2Config.from_dict(sizes)


if __name__ == "__main__":
    make(Path(sys.argv[1]))

"""Model folders whose tokenizer, embeddings and ends of a response differ, as `prepare_data` and `base` adapt them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.answered_stage import messages_of, stage_context
from synthetic.arithmetic import tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from luffy.config.model import ModelConfig, TinyArchitecture
from luffy.config.settings import BaseSettings
from luffy.data.conversations import ConversationEncoder
from luffy.data.overlap import BenchmarkIndex
from luffy.data.row_filters import Rejection, RowFilter, Rules
from luffy.data.templates import decode, encode_traces, load_tokenizer, stop_texts, stop_token_ids
from luffy.data.tokenizer import adapt_tokenizer, tokenizer_difference
from luffy.errors import DataError
from luffy.grading.pool import GraderPool
from luffy.stages.base import run
from luffy.training.model_folder import load_causal_lm, new_tiny_model
from luffy.types import Message, Prompt, Trace

ROWS = len(tiny_tokenizer())
CHAT = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}[END]\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
Change = Callable[[PreTrainedTokenizerBase], object]


@pytest.fixture
def make(tmp_path) -> Callable[..., Path]:
    """Writes a model folder: `change` edits its tokenizer after its embeddings have been made."""

    def given(change: Change = lambda tokenizer: None, **files: dict) -> Path:
        folder, tokenizer = tmp_path / "given", tiny_tokenizer()
        model = new_tiny_model(TinyArchitecture(hidden_size=16, num_heads=2, num_layers=1), tokenizer, seed=0)
        model.resize_token_embeddings(files.get("config", {}).get("vocab_size", ROWS))
        model.save_pretrained(folder)
        change(tokenizer)
        tokenizer.save_pretrained(folder)
        for name, values in files.items():
            path = folder / f"{name}.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return folder

    return given


def prepared(folder: Path, template: str | None = None) -> tuple[Path, list[str]]:
    """The model of `base`, and what the stage says."""
    here = folder.parent
    adapt_tokenizer(str(folder), template).save_pretrained(here / "data/tokenizer")
    settings = BaseSettings(seed=0, model=ModelConfig(path=str(folder)), base=None)
    run(settings, stage_context("base", here / "base", {"data": here / "data"}))
    return here / "base/model", messages_of(here / "base")


def chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Turns end with a token that is not the end of a sequence, as in Llama 3, Phi 3 and Gemma."""
    tokenizer.add_special_tokens({"extra_special_tokens": ["[END]"]})
    tokenizer.chat_template = CHAT


def test_padding_without_an_embedding_is_replaced_and_its_text_is_read_as_any_other(make):
    folder = make(lambda tokenizer: tokenizer.add_special_tokens({"pad_token": "[PAD]"}), config={"pad_token_id": ROWS})
    model, _ = prepared(folder)
    tokenizer = load_tokenizer(model)
    assert len(tokenizer) == ROWS and tokenizer.pad_token == tokenizer.eos_token
    (ids,) = encode_traces(tokenizer, ["1[PAD]2"])
    assert decode(tokenizer, ids) == "1[PAD]2"
    padded = torch.tensor([[tokenizer.pad_token_id, *ids]])
    assert load_causal_lm(model, "float32")(padded).logits.isfinite().all()
    assert tokenizer_difference(load_tokenizer(folder), tokenizer) is None, "a teacher of the family is still one"


@pytest.mark.parametrize(
    ("change", "config", "named"),
    [
        # As the picture token of Gemma 3, whose models for text have no row for it: nobody writes it.
        (lambda tokenizer: tokenizer.add_special_tokens({"extra_special_tokens": ["<picture>"]}), {}, ()),
        (lambda tokenizer: tokenizer.add_special_tokens({"eos_token": "[STOP]"}), {}, (ROWS, ROWS + 1)),
        (chat, {}, (ROWS, ROWS + 1)),
        (lambda tokenizer: [tokenizer.add_tokens("[USER]"), setattr(tokenizer, "chat_template", "[USER]" + CHAT)], {},
         (ROWS, ROWS + 1)),
        (lambda tokenizer: None, {"vocab_size": 200}, (200,)),
    ],
    ids=["nobody writes it", "the end", "the end of a turn", "a mark of the template", "another vocabulary"],
)  # fmt: skip
def test_a_token_that_occurs_needs_an_embedding(make, change, config, named):
    folder = make(change, config=config) if config else make(change)
    if not named:
        assert max(encode_traces(load_tokenizer(prepared(folder)[0]), ["1<picture>2"])[0]) < ROWS
        return
    with refused("model.path", f"embeddings for {named[0]} tokens", *map(str, named), error=DataError):
        adapt_tokenizer(str(folder), None)


@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_every_end_that_the_model_names_ends_responses(make, file):
    """Also those of what is exported for others."""
    end, other = tiny_tokenizer().eos_token_id, 77
    ends = {"generation_config": {"eos_token_id": [other, end, ROWS + 5]}}
    if file == "config":
        ends = {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [end, other]}}
    model, said = prepared(make(**ends))
    tokenizer = load_tokenizer(model)
    assert stop_token_ids(tokenizer) == (end, other)
    assert len(said) == 1 and all(end in said[0] for end in stop_texts(tokenizer))
    assert decode(tokenizer, [40, other]) == decode(tokenizer, [40, end]) == decode(tokenizer, [40])

    load_causal_lm(model, "float32").save_pretrained(model.parent / "exported")
    exported = json.loads((model.parent / "exported/generation_config.json").read_text())
    assert exported["eos_token_id"] == [end, other]


def test_one_end_leaves_every_byte_as_it_was(make):
    folder = make(generation_config={"eos_token_id": [tiny_tokenizer().eos_token_id]})
    tokenizer = adapt_tokenizer(str(folder), None)
    assert stop_token_ids(tokenizer) == (tokenizer.eos_token_id,)
    assert "stop_token_ids" not in tokenizer.init_kwargs
    before = json.loads((folder / "config.json").read_text())
    model, said = prepared(folder)
    assert json.loads((model / "config.json").read_text()) == before and not said


def test_traces_end_as_the_turns_of_the_chat_template(make):
    """Where its token is one of the model's ends; otherwise the person is told of it."""
    end = ROWS
    wide = {"vocab_size": ROWS + 8}
    folder = make(chat, config=wide, generation_config={"eos_token_id": [end, 2]})
    tokenizer = adapt_tokenizer(str(folder), None)
    assert stop_token_ids(tokenizer) == (end, tokenizer.eos_token_id)
    assert encode_traces(tokenizer, ["1"])[0][-1] == end
    assert decode(tokenizer, ConversationEncoder(tokenizer).between([Message("user", "2")])).startswith("\n<|bos|>user")
    rules = Rules(max_prompt_tokens=99, max_trace_tokens=99)
    rows = RowFilter(tokenizer, rules, BenchmarkIndex().finish())
    traces = tuple(Trace(text, "me") for text in ("1[END]", "1<|eos|>2"))
    with GraderPool(1, PATIENCE_S) as grader:
        (row,) = rows.apply([Prompt("p", "sums", (Message("user", "1"),), "1", traces)], grader)
    assert {reason for _, reason in row.rejected_traces} == {Rejection.TRACE_HOLDS_STOP_TOKEN}

    folder = make(chat, config=wide, generation_config={"eos_token_id": 2})
    _, said = prepared(folder)
    assert len(said) == 1 and 'set rl.stop and evaluation.stop to ["[END]"]' in said[0]

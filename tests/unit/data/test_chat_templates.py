"""Every chat template: what the prompt ends in, what of a trace is learned, and one `<think>` in all."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from luffy.config.shipped import DATA, template_file
from luffy.data.templates import (
    PLAIN_TEMPLATE,
    decode,
    encode_traces,
    is_complete,
    prompt_opener,
    render_prompts,
    trace_lengths,
    with_opened_thinking,
)
from luffy.data.tokenizer import adapt_tokenizer, build_tokenizer
from luffy.training.batching import collate
from luffy.training.supervised import demonstration
from luffy.types import Message

SHIPPED = sorted(file.stem for file in (DATA / "templates").glob("*.jinja"))
OPENERS = {"luffy": "<think>\n", "none": "", "plain": "", "qwen": "", "r1_zero": "<think>", "own": ""}
BASE = build_tokenizer([bytes(range(32, 127)).decode() + "\n"])
CONVERSATIONS = ([Message("user", "1 + 1?")], [Message("system", "Be kind."), Message("user", "1 + 1?")])
TRACES = ("<think>\n1+1=2\n</think>\n\\boxed{2}", "<think>1+1=2</think>\\boxed{2}", "\n<think>\n2</think>\\boxed{2}")


@pytest.fixture(scope="module", params=[*SHIPPED, "plain", "own"])
def templated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, PreTrainedTokenizerBase]:
    folder = tmp_path_factory.mktemp("model")
    BASE.save_pretrained(folder)
    if request.param == "own":
        (folder / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    return request.param, adapt_tokenizer(str(folder), request.param if request.param in SHIPPED else None)


def test_all_shipped_templates_are_known() -> None:
    assert set(SHIPPED) == set(OPENERS) - {"plain", "own"}
    assert template_file("somewhere/else.jinja") == Path("somewhere/else.jinja")
    assert BASE.chat_template == PLAIN_TEMPLATE


def test_the_generation_prompt_ends_as_it_should(templated: tuple[str, PreTrainedTokenizerBase]) -> None:
    name, tokenizer = templated
    assert prompt_opener(tokenizer) == OPENERS[name]
    for messages in CONVERSATIONS:
        text = decode(tokenizer, render_prompts(tokenizer, [messages])[0])
        assert text.endswith(OPENERS[name]) and text.count(messages[-1].content) == 1


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["user", "system"])
def test_think_is_opened_once_and_only_the_response_is_learned(templated, messages, trace):
    _, tokenizer = templated
    prompt_ids = render_prompts(tokenizer, [messages])[0]
    response_ids = encode_traces(tokenizer, [with_opened_thinking(trace)])[0]
    rows = [demonstration(prompt_ids, response_ids), demonstration([*prompt_ids, 5, 6], response_ids[2:])]
    batch = collate(rows, torch.zeros(2), tokenizer.pad_token_id)
    for row, input_ids, mask in zip(rows, batch.input_ids_BT, batch.response_mask_BT, strict=True):
        assert input_ids[mask].tolist() == list(row.response_ids)
        assert input_ids[~mask & (input_ids != tokenizer.pad_token_id)].tolist() == list(row.prompt_ids)
    learned = decode(tokenizer, batch.input_ids_BT[0][batch.response_mask_BT[0]].tolist())
    end_of_prompt = decode(tokenizer, prompt_ids)[-9:]
    assert (end_of_prompt + learned).count("<think>") == 1
    assert response_ids[-1] == tokenizer.eos_token_id
    assert learned.lstrip().removeprefix("<think>").strip() == trace.strip().removeprefix("<think>").strip()
    assert trace_lengths(tokenizer, [trace]) == [len(response_ids)]


def test_only_a_trace_without_its_opening_tag_gets_it_back() -> None:
    assert with_opened_thinking("1</think>2") == "<think>\n1</think>2"
    for text in (*TRACES, "2", "a <think> b</think> c", "<think>never closed"):
        assert with_opened_thinking(text) == text


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "\n"]), max_size=6).map("".join))
def test_opening_twice_is_opening_once(text: str) -> None:
    assert with_opened_thinking(with_opened_thinking(text)) == with_opened_thinking(text)


@pytest.mark.parametrize(
    ("text", "opener", "complete"),
    [
        ("<think>a</think>b", "", True),
        ("<think>a", "", False),
        ("\\boxed{1}", "", True),
        ("\\boxed{1}", "<think>\n", False),
        ("a</think>b", "<think>", True),
        ("<think>a</think>b<think>c", "", False),
    ],
)
def test_reasoning_must_end_where_it_began(text: str, opener: str, complete: bool) -> None:
    assert is_complete(text, opener) is complete

"""Tokenizers and templates."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Config

from luffy.data.templates import (
    decode,
    encode_traces,
    load_tokenizer,
    prompt_lengths,
    render_prompts,
    stop_token_ids,
    trace_lengths,
)
from luffy.data.tokenizer import WHOLE_TOKENS, adapt_tokenizer, build_tokenizer
from luffy.errors import DataError
from luffy.types import Message

ALPHABET = "0123456789 +-=r\n<>/think\\boxed{}é中🎉"
TRACE = "<think>\n47+8=55\n</think>\n\\boxed{55}"
TOKENIZER = build_tokenizer([ALPHABET])
THINKING_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '<think>\\n' }}"


@pytest.fixture
def thinking(tmp_path: Path) -> PreTrainedTokenizerBase:
    """The same vocabulary with a template that opens the reasoning, adapted as a model's own tokenizer would be."""
    build_tokenizer([ALPHABET + "[]usera"]).save_pretrained(tmp_path / "model")
    (tmp_path / "template.jinja").write_text(THINKING_TEMPLATE)
    return adapt_tokenizer(str(tmp_path / "model"), str(tmp_path / "template.jinja"))


@given(
    st.lists(st.one_of(st.sampled_from(WHOLE_TOKENS), st.text(ALPHABET, max_size=8), st.text(max_size=8))).map("".join)
)
def test_encoding_loses_nothing_also_of_unseen_text(text: str) -> None:
    text = unicodedata.normalize("NFC", text)
    ids = encode_traces(TOKENIZER, [text])[0]
    assert ids[-1] == TOKENIZER.eos_token_id
    assert decode(TOKENIZER, ids) == decode(TOKENIZER, ids[:-1]) == text


def test_tags_and_the_box_are_single_tokens_and_digits_are_single() -> None:
    ids = encode_traces(TOKENIZER, [TRACE])[0]
    tokens = [TOKENIZER.decode([i]) for i in ids]
    assert tokens[:7] == ["<think>", "\n", "4", "7", "+", "8", "="]
    assert tokens[-5:] == ["\\boxed{", "5", "5", "}", TOKENIZER.eos_token]


def test_the_same_texts_give_the_same_ids_in_any_order() -> None:
    texts = ["12 a:+3 b:r =", "07 a:-1 ="] * 3
    one, other = build_tokenizer(texts), build_tokenizer(reversed(texts))
    assert one.get_vocab() == other.get_vocab()
    assert len({one.pad_token_id, one.bos_token_id, one.eos_token_id}) == 3


def test_frequent_words_become_tokens_and_digits_never_merge() -> None:
    tokenizer = build_tokenizer(["12 a:+3 b:-4 =88"] * 5)
    tokens = tokenizer.tokenize("12 a:+3 b:-4 =88")
    assert tokens == ["1", "2", "\u0120a", ":+", "3", "\u0120b", ":-", "4", "\u0120=", "8", "8"]


def test_the_tokenizer_is_the_same_in_the_folder_of_a_qwen2_model(tmp_path: Path) -> None:
    """transformers 5 picks a folder's tokenizer class by the model's type, and rebuilds it."""
    texts = ["12 a:+3 b:r =", "<think>12\n a:+3 =15\n b:r =51\n</think>\\boxed{51}"]
    built = build_tokenizer(texts * 3)
    built.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(built)).save_pretrained(tmp_path)
    beside_model = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        assert beside_model(text)["input_ids"] == built(text)["input_ids"]
        assert beside_model.decode(built(text)["input_ids"]) == text


def test_a_saved_tokenizer_loads_as_it_was(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    messages = [Message("user", "1 +1 =")]
    assert render_prompts(loaded, [messages])[0] == render_prompts(TOKENIZER, [messages])[0]
    assert decode(loaded, encode_traces(loaded, [TRACE])[0]) == TRACE
    assert stop_token_ids(loaded) == stop_token_ids(TOKENIZER)


@pytest.mark.parametrize("turns", [["1 +1 ="], ["be\nkind", "1 +1 ="]])
def test_the_plain_prompt_is_what_its_template_renders(turns: list[str]) -> None:
    messages = [Message("user", turn) for turn in turns]
    rendered = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": turn} for turn in turns], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|bos|>" + "\n".join(turns) + "\n"
    assert decode(TOKENIZER, render_prompts(TOKENIZER, [messages])[0]) == rendered


def test_batches_equal_single_rows() -> None:
    conversations = [[Message("user", text)] for text in ("1", "22 +3 =", "é")]
    texts = [TRACE, "", "\\boxed{1}"]
    prompts, traces = render_prompts(TOKENIZER, conversations), encode_traces(TOKENIZER, texts)
    assert prompts == [render_prompts(TOKENIZER, [turns])[0] for turns in conversations]
    assert traces == [encode_traces(TOKENIZER, [text])[0] for text in texts]
    assert prompt_lengths(TOKENIZER, conversations) == [len(ids) for ids in prompts]
    assert trace_lengths(TOKENIZER, texts) == [len(ids) for ids in traces]
    assert render_prompts(TOKENIZER, []) == []


def test_a_trace_continues_after_a_think_tag_opened_by_the_prompt(thinking: PreTrainedTokenizerBase) -> None:
    (prompt_ids,) = render_prompts(thinking, [[Message("user", "1")]])
    assert decode(thinking, prompt_ids) == "[user]1<think>\n"
    traces = encode_traces(thinking, [TRACE, "55</think>"])
    assert [decode(thinking, ids) for ids in traces] == [TRACE.removeprefix("<think>\n"), "55</think>"]


@pytest.mark.parametrize(
    ("model", "template", "reason"),
    [("missing-folder/model", None, "no tokenizer at"), ("model", "missing.jinja", "no such file")],
)
def test_a_missing_model_or_template_is_refused(tmp_path, monkeypatch, model, template, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    TOKENIZER.save_pretrained(Path("model"))
    with pytest.raises(DataError, match=reason) as caught:
        adapt_tokenizer(str(tmp_path / model), template)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_chat_template_needs_one_and_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    bare = build_tokenizer([ALPHABET])
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"give model\.chat_template"):
        adapt_tokenizer(str(tmp_path), None)

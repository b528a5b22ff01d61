"""Tokenizers, chat templates and prompt templates: nothing is lost, one `<think>` in all, only the response is learned,
the authors' texts byte for byte, and templates from strangers in Jinja's sandbox."""

import unicodedata
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused
from synthetic.arithmetic import problems, tiny_tokenizer
from synthetic.reward_models import reward_folder
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from luffy.config import load_experiment
from luffy.config.model import check_classifier
from luffy.config.shipped import DATA, template_file
from luffy.data import templates
from luffy.data.prompt_templates import LUFFY_SYSTEM, PROMPT_TEMPLATES, ask, stops_of, template_opener
from luffy.data.templates import PLAIN_TEMPLATE, decode, encode_traces, prompt_texts, render_prompts, trace_lengths
from luffy.data.tokenizer import WHOLE_TOKENS, adapt_tokenizer, build_tokenizer
from luffy.errors import DataError
from luffy.stages.answers.paid import render_as_text
from luffy.training.batching import collate
from luffy.training.supervised import demonstration
from luffy.types import Message, Prompt

ALPHABET = "0123456789 +-=r\n<>/think\\boxed{}é中🎉"
TRACE = "<think>\n47+8=55\n</think>\n\\boxed{55}"
TOKENIZER = build_tokenizer([ALPHABET])


def user(text):
    return [Message("user", text)]


@given(st.lists(st.sampled_from(WHOLE_TOKENS) | st.text(ALPHABET, max_size=8) | st.text(max_size=8)).map("".join))
def test_encoding_loses_nothing_also_of_unseen_text(text):
    text = unicodedata.normalize("NFC", text)
    ids = encode_traces(TOKENIZER, [text])[0]
    assert ids[-1] == TOKENIZER.eos_token_id
    assert decode(TOKENIZER, ids) == decode(TOKENIZER, ids[:-1]) == text


def test_tags_and_the_box_are_single_tokens_digits_never_merge_and_frequent_words_do():
    tokens = [TOKENIZER.decode([token]) for token in encode_traces(TOKENIZER, [TRACE])[0]]
    assert tokens[:7] == ["<think>", "\n", "4", "7", "+", "8", "="]
    assert tokens[-5:] == ["\\boxed{", "5", "5", "}", TOKENIZER.eos_token]
    text = "12 a:+3 b:-4 =88"
    frequent = build_tokenizer([text] * 5).tokenize(text)
    assert frequent == ["1", "2", "\u0120a", ":+", "3", "\u0120b", ":-", "4", "\u0120=", "8", "8"]


def test_the_same_texts_give_the_same_ids_in_any_order_and_in_the_folder_of_a_model(tmp_path):
    """transformers 5 picks a folder's tokenizer class by the model's type, and rebuilds it."""
    texts = ["12 a:+3 b:r =", "<think>12\n a:+3 =15\n b:r =51\n</think>\\boxed{51}"]
    built, other = build_tokenizer(texts * 3), build_tokenizer(reversed(texts * 3))
    assert built.get_vocab() == other.get_vocab()
    assert len({built.pad_token_id, built.bos_token_id, built.eos_token_id}) == 3
    built.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(built)).save_pretrained(tmp_path)
    beside_model = AutoTokenizer.from_pretrained(tmp_path)
    for text in texts:
        assert beside_model(text)["input_ids"] == built(text)["input_ids"]
        assert beside_model.decode(built(text)["input_ids"]) == text


@pytest.mark.parametrize("turns", [["1 +1 ="], ["be\nkind", "1 +1 ="]])
def test_the_plain_prompt_is_what_its_template_renders(turns):
    messages = [Message("user", turn) for turn in turns]
    rendered = TOKENIZER.apply_chat_template([*map(asdict, messages)], add_generation_prompt=True, tokenize=False)
    assert rendered == "<|bos|>" + "\n".join(turns) + "\n"
    assert decode(TOKENIZER, render_prompts(TOKENIZER, [messages])[0]) == rendered


def test_batches_equal_single_rows_and_a_saved_tokenizer_loads_as_it_was(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = templates.load_tokenizer(tmp_path)
    conversations, texts = [user(text) for text in ("1", "22 +3 =", "é")], [TRACE, "", "\\boxed{1}"]
    prompts, traces = render_prompts(TOKENIZER, conversations), encode_traces(TOKENIZER, texts)
    assert prompts == [render_prompts(loaded, [turns])[0] for turns in conversations]
    assert traces == [encode_traces(loaded, [text])[0] for text in texts]
    assert templates.prompt_lengths(TOKENIZER, conversations) == [len(ids) for ids in prompts]
    assert trace_lengths(TOKENIZER, texts) == [len(ids) for ids in traces]
    assert render_prompts(TOKENIZER, []) == []
    assert decode(loaded, traces[0]) == TRACE
    assert templates.stop_token_ids(loaded) == templates.stop_token_ids(TOKENIZER)


def llama_like(prepend, end):
    """A tokenizer that begins texts with a space, under a template that ends with `end`."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator([ALPHABET, "So 1 + 1 = 2"], trainers.BpeTrainer(special_tokens=special))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    template = "<s>{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}" + end
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.mark.parametrize("prepend", ["always", "first"])
@pytest.mark.parametrize("end", ["\n", "</s>\n<s>", "\nr ", "\n<think>\n", ""])
def test_a_trace_has_the_ids_that_it_has_after_its_prompt(prepend, end):
    tokenizer = llama_like(prepend, end)
    for text in ("2", "\\boxed{2}", "So 1 + 1 = 2", " 2", "\n2"):
        (prompt,), (trace,) = render_prompts(tokenizer, [user("1 + 1?")]), encode_traces(tokenizer, [text])
        whole = tokenizer(prompt_texts(tokenizer, [user("1 + 1?")])[0] + text, add_special_tokens=False)["input_ids"]
        alone = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = whole[len(prompt) :] if whole[: len(prompt)] == prompt else alone
        assert trace == [*expected, tokenizer.eos_token_id]
        assert trace_lengths(tokenizer, [text]) == [len(trace)]
    assert [*render_prompts(tokenizer, [user("1")])[0]].count(1) == end.count("<s>") + 1
    (asked,) = ask(tokenizer, problems(1), "<s>Q: {question}")
    assert asked.count(1) == 1


SHIPPED = sorted(file.stem for file in (DATA / "templates").glob("*.jinja"))
OPENERS = {  # "own" and "thinking" are templates of the model
    "luffy": "<think>\n", "none": "", "plain": "", "qwen": "", "r1_zero": "<think>", "own": "", "thinking": "<think>\n",
}  # fmt: skip
OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
OWN_FILES = {"own": OWN, "thinking": OWN + "{{ '<think>\\n' }}"}
CONVERSATIONS = {"user": user("1 + 1?"), "system": [Message("system", "Be kind."), *user("1 + 1?")]}
TRACES = ("<think>\n1+1=2\n</think>\n\\boxed{2}", "<think>1+1=2</think>\\boxed{2}", "\n<think>\n2</think>\\boxed{2}")
ASCII = build_tokenizer([bytes(range(32, 127)).decode() + "\n"])


@pytest.fixture(scope="module", params=OPENERS)
def templated(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    ASCII.save_pretrained(folder)
    if request.param in OWN_FILES:
        (folder / "chat_template.jinja").write_text(OWN_FILES[request.param])
    return request.param, adapt_tokenizer(str(folder), request.param if request.param in SHIPPED else None)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_think_is_opened_once_and_only_the_response_is_learned(templated, messages, trace):
    name, tokenizer = templated
    prompt_ids = render_prompts(tokenizer, [messages])[0]
    text = decode(tokenizer, prompt_ids)
    assert text.endswith(OPENERS[name]) and text.count(messages[-1].content) == 1
    assert templates.prompt_opener(tokenizer) == OPENERS[name]
    response_ids = encode_traces(tokenizer, [templates.with_opened_thinking(trace)])[0]
    rows = [demonstration(prompt_ids, response_ids), demonstration([*prompt_ids, 5, 6], response_ids[2:])]
    batch = collate(rows, torch.zeros(2), tokenizer.pad_token_id)
    for row, input_ids, mask in zip(rows, batch.input_ids_BT, batch.response_mask_BT, strict=True):
        assert input_ids[mask].tolist() == list(row.response_ids)
        assert input_ids[~mask & (input_ids != tokenizer.pad_token_id)].tolist() == list(row.prompt_ids)
    learned = decode(tokenizer, batch.input_ids_BT[0][batch.response_mask_BT[0]].tolist())
    assert (text[-9:] + learned).count("<think>") == 1
    assert response_ids[-1] == tokenizer.eos_token_id
    assert learned.lstrip().removeprefix("<think>").strip() == trace.strip().removeprefix("<think>").strip()
    assert trace_lengths(tokenizer, [trace]) == [len(response_ids)]


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "\n"]), max_size=6).map("".join))
def test_only_a_trace_without_its_opening_tag_gets_it_back_and_opening_twice_is_opening_once(text):
    assert templates.with_opened_thinking("1</think>2") == "<think>\n1</think>2"
    once = templates.with_opened_thinking(text)
    for complete in (*TRACES, "2", "a <think> b</think> c", "<think>never closed", once):
        assert templates.with_opened_thinking(complete) == complete


@pytest.mark.parametrize(("text", "opener", "complete"), [
    ("<think>a</think>b", "", True), ("<think>a", "", False), ("\\boxed{1}", "", True), ("a</think>b", "<think>", True),
    ("\\boxed{1}", "<think>\n", False), ("<think>a</think>b<think>c", "", False),
])  # fmt: skip
def test_reasoning_must_end_where_it_began(text, opener, complete):
    assert templates.is_complete(text, opener) is complete


LEAVES_OUT = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
"""As one for images does, which goes through the parts of a content: the letters of a text have none."""


@pytest.mark.parametrize(("own", "model", "template", "named"), [
    (PLAIN_TEMPLATE, "missing-folder/model", None, ["no tokenizer at"]),
    (PLAIN_TEMPLATE, "model", "missing.jinja", ["no such file"]), (None, "model", None, ["give model.chat_template"]),
    (LEAVES_OUT, "model", None, ("leaves out the user's message", "give model.chat_template")),
])  # fmt: skip
def test_a_missing_model_or_template_is_refused(tmp_path, monkeypatch, own, model, template, named):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = build_tokenizer([ALPHABET])
    tokenizer.chat_template = own
    tokenizer.save_pretrained("model")
    with refused(*named, error=DataError):
        adapt_tokenizer(str(tmp_path / model), template)
    with refused("holds no tokenizer", error=DataError):
        templates.load_tokenizer(tmp_path)
    # Shipped ones go by their names, one's own by its path.
    assert set(SHIPPED) == set(OPENERS) - {"plain", *OWN_FILES}
    assert template_file("somewhere/else.jinja") == Path("somewhere/else.jinja")
    (tmp_path / "own.jinja").write_text(OWN)
    for given_template in ("none", str(tmp_path / "own.jinja")):
        adapted = adapt_tokenizer(str(tmp_path / "model"), given_template).chat_template
        assert adapted and (adapted == OWN) == (given_template != "none")


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch owned') }}",
    "{{ lipsum.__globals__['os'].popen('touch owned').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ strftime_now.__globals__.os }}",
    "{% set x = messages.append(1) %}", "{% for i in range(10 ** 9) %}a{% endfor %}",
    "{{ (''|attr('__class__')).mro() }}",
    "{{ 'a' + 1 }}",
    "{{ 1 // 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]  # fmt: skip


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_that_leaves_the_sandbox_or_fails_is_one_line(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer(["0123456789"])
    tokenizer.chat_template = template
    with refused("the chat template cannot write a conversation", error=DataError):
        prompt_texts(tokenizer, [user("1")])
    assert not list(tmp_path.iterdir())


def test_several_named_templates_without_a_default_are_refused_and_text_of_a_message_is_no_template():
    tokenizer = build_tokenizer(["0123456789"])
    tokenizer.chat_template = {"tool_use": PLAIN_TEMPLATE, "rag": PLAIN_TEMPLATE}
    with refused("cannot write a conversation", "no default", "give another one", error=DataError):
        prompt_texts(tokenizer, [user("1")])
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert prompt_texts(tokenizer, [user("{{ 7 * 6 }}{% raw %}")]) == ["{{ 7 * 6 }}{% raw %}"]


QUESTION = "What is $1+1$?\n"
ASKED = Prompt("p", "s", (Message("system", "Be brief."), Message("user", QUESTION)), "2")
ZERO = (
    "A conversation between User and Assistant. The {u}ser asks a question, and the Assistant solves it. The "
    "{a}ssistant first thinks about the reasoning process in the mind and then provides the {u}ser with the answer. "
)
BOXED = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"
TEXTS = {
    "qwen_math": "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}."
    f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
    "qwen_boxed": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    f"{QUESTION}\nPlease reason step by step, and put your final answer within \\boxed{{}}.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "r1_zero": ZERO.format(u="U", a="A")
    + "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
    "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
    f"User: {QUESTION}\nAssistant: <think>",
    "luffy_think": f"<|im_start|>system\n{LUFFY_SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n",
    "prime": ZERO.format(u="u", a="a")
    + "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, "
    f"respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: {QUESTION}"
    f"{BOXED}. Assistant:",
    "prime_sft": prompt_texts(tiny_tokenizer(), [user(QUESTION + BOXED)])[0],
    "none": QUESTION,
}
TEXTS["prime_code"] = TEXTS["prime"].replace(
    BOXED.strip(),
    "Write Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end.",
)
TEXTS["luffy_simplerl"] = TEXTS["qwen_boxed"].replace(" \\boxed{}", "\\boxed{{}}")


@pytest.mark.parametrize("name", PROMPT_TEMPLATES)
def test_the_text_of_a_prompt_template_is_that_of_its_authors(name):
    tokenizer = tiny_tokenizer()
    assert decode(tokenizer, ask(tokenizer, [ASKED], name)[0]) == TEXTS[name]
    (shown,) = render_as_text([ASKED], name)  # for a server, which writes chats itself
    assert (prompt_texts(tokenizer, [shown.messages])[0] if shown.messages else shown.text) == TEXTS[name]
    assert bool(shown.messages) == (name == "prime_sft")


def test_own_is_the_chat_template_over_all_messages_and_a_text_of_the_users_surrounds_the_question():
    tokenizer, own = tiny_tokenizer(), "Solve {question}\n<think>\n"
    assert ask(tokenizer, [ASKED], "own") == render_prompts(tokenizer, [ASKED.messages])
    assert render_as_text([ASKED], "own")[0].messages == ASKED.messages
    (ids,) = ask(tokenizer, [ASKED], own)
    assert decode(tokenizer, ids) == f"Solve {QUESTION}\n<think>\n"
    openers = {name: template_opener(tokenizer, name) for name in ("own", *PROMPT_TEMPLATES, own)}
    opened = {name: opener for name, opener in openers.items() if opener}
    assert opened == {"r1_zero": "<think>", "luffy_think": "<think>\n", own: "<think>\n"}
    stops = [stops_of(name) for name in ("own", "r1_zero", "qwen_math", "{question}")]
    assert stops == [(), ("</answer>",), (), ()]
    config = load_experiment(Path(__file__).parents[3] / "exp_configs/luffy_qwen2.5_math_7b.yaml", [])
    assert config.data.system_prompt == LUFFY_SYSTEM
    # A tokenizer that opens texts opens prompts.
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    tokens = [(bos, tokenizer.bos_token_id), (eos, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=tokens)
    assert decode(tokenizer, ask(tokenizer, problems(1), "none")[0]) == f"{bos}0 +1"


def test_a_template_needs_one_question_and_only_own_a_chat_template():
    tokenizer = tiny_tokenizer()
    turns = (Message("user", "1"), Message("assistant", "2"), Message("user", "3"))
    with refused("problem p: the template none takes one question", "user, ass", error=DataError):
        ask(tokenizer, [Prompt("p", "s", turns, "4")], "none")
    tokenizer.chat_template = None
    assert ask(tokenizer, problems(1), "none")
    with refused("has no chat template; give model.chat_template (`none`", error=DataError):
        ask(tokenizer, problems(1), "own")


LLAMA = (
    "{% if not date is defined %}{% if strftime_now is defined %}{% set date = strftime_now('%d %b %Y') %}"
    "{% else %}{% set date = '26 Jul 2024' %}{% endif %}{% endif %}Today is {{ date }}: {{ messages[-1].content }}"
)
GRANITE = 'It is {{ strftime_now( "%B %d, %Y" ) }}. {{ messages[-1].content }}'


@pytest.mark.parametrize(("template", "prompt"), [
    (LLAMA, "Today is 05 Nov 2026: abc"), (GRANITE, "It is November 05, 2026. abc"),
])  # fmt: skip
def test_the_chosen_day_is_written_whenever_the_prompt_is_made(tmp_path, template, prompt):
    """A template that writes today's date would give a resumed run other prompts."""
    model = tmp_path / "model"
    build_tokenizer(["abc"]).save_pretrained(model)
    (model / "chat_template.jinja").write_text(template)
    with refused("model.template_date", "today", error=DataError):
        adapt_tokenizer(str(model), None)
    tokenizer = adapt_tokenizer(str(model), None, template_date="2026-11-05")
    assert prompt_texts(tokenizer, [user("abc")]) == [prompt]
    assert "strftime" not in tokenizer.chat_template
    for day, named in (("2026-02-30", "2026-02-30"), ("2026-02-01", "computed format")):
        with refused(named, error=DataError):
            templates.with_date("{{ strftime_now(form) }}", day, "")
    folder = reward_folder(tmp_path / "reward")
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}")
    with refused("grading.path", str(folder / "chat_template.jinja"), error=DataError):
        check_classifier(folder, "grading.path")

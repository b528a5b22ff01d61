"""Prompt templates are the authors' texts, byte for byte, around the question alone."""

from pathlib import Path

import pytest
from support.installed import DATASETS, needs_datasets
from synthetic.arithmetic import problems, tiny_tokenizer

from luffy.config import load_experiment
from luffy.config.data import FileSource
from luffy.data.prompt_templates import LUFFY_SYSTEM, PROMPT_TEMPLATES, ask, stops_of, template_opener
from luffy.data.row_filters import without_system
from luffy.data.templates import decode, prompt_texts, render_prompts
from luffy.errors import DataError
from luffy.stages.answers.paid import render_as_text
from luffy.types import Message, Prompt
from tests.synthetic.loaded_source import load_source

QUESTION = "What is $1+1$?\n"
PROMPT = Prompt("p", "s", (Message("system", "Be brief."), Message("user", QUESTION)), "2")
ZERO = (
    "A conversation between User and Assistant. The {u}ser asks a question, and the Assistant solves it. The "
    "{a}ssistant first thinks about the reasoning process in the mind and then provides the {u}ser with the answer. "
)
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
    f"respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: {QUESTION}\n\n"
    "Present the answer in LaTex format: \\boxed{Your answer}. Assistant:",
    "none": QUESTION,
}
TEXTS["prime_code"] = TEXTS["prime"].replace(
    "Present the answer in LaTex format: \\boxed{Your answer}",
    "Write Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end.",
)
TEXTS["luffy_simplerl"] = TEXTS["qwen_boxed"].replace(" \\boxed{}", "\\boxed{{}}")
BOXED = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"


@pytest.mark.parametrize("name", PROMPT_TEMPLATES)
def test_the_text_is_that_of_the_authors(name: str) -> None:
    tokenizer = tiny_tokenizer()
    TEXTS["prime_sft"] = prompt_texts(tokenizer, [[Message("user", QUESTION + BOXED)]])[0]
    (ids,) = ask(tokenizer, [PROMPT], name)
    assert decode(tokenizer, ids) == TEXTS[name]


@needs_datasets
def test_luffys_nine_templates_ask_the_problems_of_its_evaluation_file() -> None:
    """The names of its `--template`, with both forms of `simplerl`, and the text around the question in its script."""
    source = FileSource(kind="file", path=str(DATASETS / "luffy_eval" / "valid.all.parquet"), max_rows=1)
    prompts = without_system(load_source(source, "suites.luffy", 0).prompts)
    tokenizer, question = tiny_tokenizer(), prompts[0].messages[0].content
    assert [message.role for message in prompts[0].messages] == ["user"] and question != QUESTION
    texts = {ours: text.replace(QUESTION, question) for ours, text in TEXTS.items()}
    chat, boxed = prompt_texts(tokenizer, [[Message("user", question)], [Message("user", question + BOXED)]])
    theirs = {
        "own": ("own", chat), "repo": ("own", chat), "prime_sft": ("prime_sft", boxed),
        "simplerl": ("luffy_simplerl", texts["luffy_simplerl"]),
        "simplerl of ExGRPO": ("qwen_boxed", texts["qwen_boxed"]),
        "qwen": ("qwen_math", texts["qwen_math"]), "prime": ("prime", texts["prime"]),
        "prime_code": ("prime_code", texts["prime_code"]), "no": ("none", question),
    }  # fmt: skip
    for ours, text in theirs.values():
        shown = render_as_text(prompts, ours)[0]
        in_chat = bool(shown.messages)
        written = prompt_texts(tokenizer, [shown.messages])[0] if in_chat else shown.text
        assert written == text and in_chat == (ours in ("own", "prime_sft"))


def test_a_text_of_the_users_own_surrounds_the_question() -> None:
    tokenizer = tiny_tokenizer()
    (ids,) = ask(tokenizer, [PROMPT], "Solve {question}\n<think>\n")
    assert decode(tokenizer, ids) == f"Solve {QUESTION}\n<think>\n"
    assert template_opener(tokenizer, "Solve {question}\n<think>\n") == "<think>\n"
    assert stops_of("{question}") == ()


def test_luffy_thinks_with_the_system_message_of_its_configuration() -> None:
    config = load_experiment(Path(__file__).parents[3] / "exp_configs/luffy_qwen2.5_math_7b.yaml", [])
    assert config.data.system_prompt == LUFFY_SYSTEM


def test_own_is_the_chat_template_over_all_messages() -> None:
    tokenizer = tiny_tokenizer()
    assert ask(tokenizer, [PROMPT], "own") == render_prompts(tokenizer, [PROMPT.messages])


def test_opened_tags_and_stop_texts_of_the_templates() -> None:
    openers = {name: template_opener(tiny_tokenizer(), name) for name in ("own", *PROMPT_TEMPLATES)}
    assert {name: opener for name, opener in openers.items() if opener} == {
        "r1_zero": "<think>",
        "luffy_think": "<think>\n",
    }
    assert (stops_of("own"), stops_of("r1_zero"), stops_of("qwen_math")) == ((), ("</answer>",), ())


def test_a_model_without_a_chat_template_is_refused_only_where_it_needs_one() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    assert ask(tokenizer, problems(1), "none")
    with pytest.raises(DataError, match=r"has no chat template; give model\.chat_template \(`none`"):
        ask(tokenizer, problems(1), "own")


def test_a_conversation_is_not_a_question() -> None:
    turns = (Message("user", "1"), Message("assistant", "2"), Message("user", "3"))
    with pytest.raises(DataError, match="problem p: the template none takes one question, and the turns are user, ass"):
        ask(tiny_tokenizer(), [Prompt("p", "s", turns, "4")], "none")


def test_a_tokenizer_that_opens_texts_opens_prompts() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    tokens = [(bos, tokenizer.bos_token_id), (eos, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A {eos}", special_tokens=tokens)
    (ids,) = ask(tokenizer, problems(1), "none")
    assert decode(tokenizer, ids) == f"{bos}0 +1"

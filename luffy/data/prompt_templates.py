r"""Prompt templates: how a benchmark's question becomes the text that a model continues.

    asked = ask(tokenizer, prompts, "qwen_math")               # token ids, a prompt each
    asked = ask(tokenizer, prompts, "Q: {question}\nA:")       # a template of the user's own
    template = named_or_own("r1_zero")                         # its texts, and what it stops at

`own` is the model's chat template over all messages of the data. Every other template is a fixed text around the
question, the one user message of the prompt; the data's system message is left out, since the template has its own or
needs none. The texts of `PROMPT_TEMPLATES` are the authors', byte for byte: a single space can move scores by many
points. LUFFY's `--template` has other names for some: `qwen` is `qwen_math`, `simplerl` is `luffy_simplerl` (ExGRPO's
`qwen_boxed`), `no` is `none`; its `own`, and `repo`, are `own` with `data.remove_system`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import QUESTION_SLOT, template_label
from luffy.data.templates import encode_prompts, opener_of, prompt_opener, render_prompts
from luffy.errors import DataError
from luffy.types import Message, Prompt

OWN = "own"

LUFFY_SYSTEM = (
    "Your task is to follow a systematic, thorough reasoning process before providing the final solution. This "
    "involves analyzing, summarizing, exploring, reassessing, and refining your thought process through multiple "
    "iterations. Structure your response into two sections: Thought and Solution. In the Thought section, present your "
    'reasoning using the format: "<think>\\n {thoughts} </think>\\n". Each thought should include detailed analysis, '
    'brainstorming, verification, and refinement of ideas. After "</think>\\n," in the Solution section, provide the '
    "final, logical, and accurate answer, clearly derived from the exploration in the Thought section. If applicable, "
    "include the answer in \\boxed{} for closed-form results like multiple choices or mathematical solutions."
)
"""LUFFY's system message, in training and evaluation (arXiv 2504.14945, appendix C.2)."""


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The text before the question and the text after it."""

    before: str
    after: str
    stop: tuple[str, ...] = ()
    """Stop strings; they remain part of the response."""
    in_chat: bool = False
    """Whether the text is a user's message, written by the model's chat template."""


_PRIME = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> "
    "reasoning process here </think> <answer> answer here </answer>. User: "
)
_IN_A_BOX = "\n\nPresent the answer in LaTex format: \\boxed{Your answer}"
_AS_CODE = "\n\nWrite Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
_QWEN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
PROMPT_TEMPLATES = {
    # Qwen2.5-Math's evaluation (arXiv 2409.12122), "qwen25-math-cot"; LUFFY's `qwen`.
    "qwen_math": PromptTemplate(
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
    # SimpleRL-Zoo's "qwen-boxed" (arXiv 2503.18892), with which ExGRPO evaluates (`simplerl`). LUFFY's own copy lacks
    # the space before \boxed and has doubled braces after it.
    "qwen_boxed": PromptTemplate(
        _QWEN,
        "\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n<|im_start|>assistant\n",
    ),
    "luffy_simplerl": PromptTemplate(
        _QWEN,
        "\nPlease reason step by step, and put your final answer within\\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n",
    ),
    # DeepSeek-R1-Zero (arXiv 2501.12948, table 1) as Dr.GRPO evaluates with it (arXiv 2503.20783).
    "r1_zero": PromptTemplate(
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\nUser: ",
        "\nAssistant: <think>",
        stop=("</answer>",),
    ),
    # LUFFY's chat template over its own system message.
    "luffy_think": PromptTemplate(
        f"<|im_start|>system\n{LUFFY_SYSTEM}<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    # Eurus-2-7B-PRIME-Zero's model card, with which LUFFY and Dr.GRPO evaluate that model; for problems of programming,
    # and (LUFFY's `prime_sft`) within the chat template of Eurus-2-7B-SFT.
    "prime": PromptTemplate(_PRIME, f"{_IN_A_BOX}. Assistant:"),
    "prime_code": PromptTemplate(_PRIME, f"{_AS_CODE}. Assistant:"),
    "prime_sft": PromptTemplate("", _IN_A_BOX, in_chat=True),
    "none": PromptTemplate("", ""),
}


def ask(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], template: str) -> list[list[int]]:
    """Return the ids of each prompt under a template, given by name or as a text with `{question}`.

    Raises DataError where the template is `own` and the tokenizer has none, or where it is another one and a prompt
    does not consist of exactly one user message, apart from system messages.
    """
    if is_chat(template):
        return render_prompts(tokenizer, [chat_messages(prompt, template) for prompt in prompts])
    return encode_prompts(tokenizer, [prompt_text(prompt, template) for prompt in prompts])


def is_chat(template: str) -> bool:
    """Whether the model's chat template writes the prompts of this template."""
    return template == OWN or named_or_own(template).in_chat


def chat_messages(prompt: Prompt, template: str) -> tuple[Message, ...]:
    """Return the messages of a prompt under a template that `is_chat`; DataError as `ask`."""
    return prompt.messages if template == OWN else (Message("user", prompt_text(prompt, template)),)


def prompt_text(prompt: Prompt, template: str) -> str:
    """Return the text of a prompt under a template other than `own`; DataError as `ask`."""
    turns = [message for message in prompt.messages if message.role != "system"]
    if len(turns) != 1 or turns[0].role != "user":
        roles = ", ".join(message.role for message in turns) or "none"
        raise DataError(
            f"problem {prompt.uid}: the template {template_label(template)} takes one question, and the turns are "
            f"{roles}; use the template own"
        )
    around = named_or_own(template)
    return around.before + turns[0].content + around.after


def template_opener(tokenizer: PreTrainedTokenizerBase | None, template: str) -> str:
    """Return the `<think>` with which prompts of the named template end, or "".

    Without a tokenizer, `own` stands for the chat template of a remote server, which returns whole replies.
    """
    if not is_chat(template):
        return opener_of(named_or_own(template).after)
    return "" if tokenizer is None else prompt_opener(tokenizer)


def stops_of(template: str) -> tuple[str, ...]:
    """Return the stop strings of a template; a user's own has none."""
    return () if template == OWN else named_or_own(template).stop


def named_or_own(template: str) -> PromptTemplate:
    """Return the template of that name, or that of a text with `{question}`."""
    if template in PROMPT_TEMPLATES:
        return PROMPT_TEMPLATES[template]
    before, _, after = template.partition(QUESTION_SLOT)
    return PromptTemplate(before, after)

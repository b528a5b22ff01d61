r"""Extraction of the final answer from a response: the last `\boxed{...}` outside the reasoning.

The rules, for every kind of grader: only the text after the last `</think>` counts. Reasoning that is opened and never
closed means no answer. The last balanced box wins; without one, a last line `#### 18`, the form of GSM8K's solutions.
Where the prompt asks for `<answer>`, that comes first. A repetition of the question is not an answer. `plain_answer`
serves graders that accept answers without such a mark.

Everything here runs in time linear in the length of the response.
"""

import ast
import re
from collections.abc import Sequence
from typing import NamedTuple

from luffy.json_text import parse_json

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
BOX, TAG = "the box", "<answer>"
"""Signs of an answer."""
_BOX = r"\boxed"

# Alternatives that cannot overlap and a possessive quantifier: no input makes this backtrack. `\\boxed` (a doubled
# backslash, common in model output) still opens a box.
_TOKEN = re.compile(r"\\boxed\s*+\{|\\[{}]|\\\\(?!boxed)|[{}]")

_ANSWER_OPEN, _ANSWER_CLOSE = "<answer>", "</answer>"
_CUE = re.compile(r"(?:answer|solution)(?: is|\*{0,2} *:|s are)[ \t:]*(?=\S)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])[+-]?[0-9]++(?:,[0-9]{3})*+(?:\.[0-9]++)?+(?:/[0-9]++)?+%?")
_WORD = re.compile(r"(?<![A-Za-z\\])(?!(?:and|or)(?![a-z]))[A-Za-z]{2,}")
_CHINESE = re.compile("[一-鿿]")
"""Words without spaces between them."""
_HASHED = re.compile(r"[ \t]*#### *(?P<answer>[^#\s].*)")
_COUNTED = re.compile(r"[$€£¥₹]? ?[0-9]+(?:[,./][0-9]+)*%?(?: [a-z]+){1,4}\.?")
_DOLLAR = re.compile(r"(?<!\\)\$")
_AMOUNT = re.compile(r"\.?[0-9]")
_MAX_BARE = 100
_MIN_ECHO = 8
"""A shorter question or message may occur in a reply by chance."""
_MAX_PHRASE = 1000
_WRAPPED = re.compile(r"""\{\s*["']ground_truth["']\s*:.*\}|\[\s*["'].*["']\s*\]""", re.DOTALL)
_UNCLOSED = re.compile(r"\\{1,2}boxed\s*\{")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm)\{([^{}]*)\}")
_NO_ANSWERS = frozenset(
    ("proof", "notfound", "not found", "none", "null", "nan", "inf", "+inf", "-inf", "n/a", "unknown", "", "-", "?")
)
"""What data sets write for problems without an answer: a policy would learn to write the same."""


class Extracted(NamedTuple):
    """An answer and the cue that marked it."""

    answer: str
    sign: str


def own_reply(response: str, question: str, marked_only: bool, shown: Sequence[str] = ()) -> str | None:
    """Return the final reply without repetitions of `question` and the other texts shown; None in unclosed reasoning.

    With `marked_only`, texts without a marked answer are left in: they may be part of an honest answer.
    """
    reply = final_reply(response)
    if reply is None:
        return None
    # The longest first: one text may contain another.
    for text in sorted({text.strip() for text in (question, *shown)}, key=lambda text: (-len(text), text)):
        if len(text) >= _MIN_ECHO and text in reply and (not marked_only or marked_answer(text, True) is not None):
            reply = reply.replace(text, "\n")
    return reply


def boxed_answer(reply: str) -> str | None:
    """Return the content of the last box of a final reply, stripped; None without one or with an empty one."""
    return (last_box(reply) or "").strip() or None


def asks_for_tag(prompt: str) -> bool | None:
    """Whether a prompt wants the answer in `<answer>`, as that of r1_zero does; None where it names a box, too."""
    return None if _ANSWER_OPEN in prompt and _BOX in prompt else _ANSWER_OPEN in prompt


def marked_answer(reply: str, in_tag: bool | None = None) -> Extracted | None:
    """Return the answer that a final reply marks as such: the last box, else a last line of `####` and a formula.

    With words, other than a noun after a number, such a line is a heading. With `in_tag`, what the last `<answer>`
    holds comes first. Without a known prompt (None) it does so where it is the whole reply, the form of r1_zero.
    """
    bare = reply.strip()
    if in_tag is None:
        in_tag = bare.startswith(_ANSWER_OPEN) and bare.endswith(_ANSWER_CLOSE) and bare.count(_ANSWER_OPEN) == 1
    tagged = answer_tag(reply) if in_tag else None
    boxed = boxed_answer(tagged or reply)
    if tagged is not None and boxed is None:
        return Extracted(tagged, TAG)
    if boxed is not None:
        return Extracted(boxed, BOX)
    hashed = _HASHED.fullmatch(bare.rpartition("\n")[2])
    line = "" if hashed is None else hashed["answer"]
    is_answer = 0 < len(line) <= _MAX_BARE and (_COUNTED.fullmatch(line) or not _WORD.search(line))
    return Extracted(line, "####") if is_answer else None


def read_reference(text: str) -> str | None:
    """Return the answer in a reference as data sets write it; None where it states none (`proof`, `notfound`, `nan`).

    A last line `#### 5`, `{"ground_truth": "5"}` and `["5"]` are 5.
    """
    text = text.strip()
    if _WRAPPED.fullmatch(text):
        for read in (parse_json, ast.literal_eval):
            try:
                value = read(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            if isinstance(value, dict | list) and len(value) == 1:
                (text,) = map(str, value.values() if isinstance(value, dict) else value)
            break
    if hashed := _HASHED.fullmatch(text.rpartition("\n")[2]):
        text = hashed["answer"]
    if (opened := _UNCLOSED.match(text)) and last_box(text) is None:
        text = text[opened.end() :]
    return None if _TEXT_COMMAND.sub(r"\1", text).strip(" $.").casefold() in _NO_ANSWERS else text


def plain_answer(reply: str) -> Extracted | None:
    """Return the answer of a final reply that marks none, by the first of these cues that it contains.

    The content of the last `<answer>`, the text after the last "the answer is", the last formula between dollar signs,
    a short reply without words, the last number.
    """
    tagged = answer_tag(reply)
    if tagged is not None:
        return Extracted(boxed_answer(tagged) or tagged, TAG)
    cues = list(_CUE.finditer(reply))
    if cues:
        # The rest of the line or sentence, without emphasis and dollar signs.
        line = reply[cues[-1].end() :][:_MAX_PHRASE].split("\n", 1)[0]
        sentence = re.split(r"\.(?=\s|$)", line, maxsplit=1)[0].strip().strip("*_ ")
        tail = sentence.rpartition(" is ")[2].strip().strip("*_ ")
        phrase = _last_formula(tail) or tail
        if phrase:
            return Extracted(phrase, "'the answer is'")
    formula = _last_formula(reply)
    if formula:
        return Extracted(formula, "the last formula")
    if len(reply) <= _MAX_BARE and not _WORD.search(reply) and not _CHINESE.search(reply) and reply.strip():
        return Extracted(reply.strip(), "the whole reply")
    numbers = _NUMBER.findall(reply)
    return Extracted(numbers[-1], "the last number") if numbers else None


def answer_tag(reply: str) -> str | None:
    """Return the content of the last closed `<answer>`, stripped; None without one or with an empty one."""
    closed = reply.rfind(_ANSWER_CLOSE)
    opened = reply.rfind(_ANSWER_OPEN, 0, closed) if closed >= 0 else -1
    return reply[opened + len(_ANSWER_OPEN) : closed].strip() or None if opened >= 0 else None


def _last_formula(text: str) -> str | None:
    for mark in ("\\(", "\\)", "\\[", "\\]", "$$"):
        text = text.replace(mark, "$")
    opened, found = None, None
    for dollar in _DOLLAR.finditer(text):
        inside = "" if opened is None else text[opened : dollar.start()]
        # A dollar sign may begin an amount of money, as in `$5 and $6` or `$2*3=$6`, and no formula.
        is_prose = inside[-1:].isspace() and _WORD.search(inside) is not None
        is_counted = text[dollar.end() : dollar.end() + 1].isdigit()
        if opened is None or (_AMOUNT.match(inside) is not None and (is_counted or is_prose)):
            opened = dollar.end()
        else:
            opened, found = None, inside.strip() or found
    return found if opened is None else None


def final_reply(response: str) -> str | None:
    """Return the text after the last `</think>` (all of it if there is none), or None if the reasoning is unclosed.

    A response may also close a `<think>` that its prompt opened.
    """
    opened, closed = response.rfind(THINK_OPEN), response.rfind(THINK_CLOSE)
    if opened > closed:
        return None
    return response if closed < 0 else response[closed + len(THINK_CLOSE) :]


def last_box(text: str) -> str | None:
    r"""Return the content of the balanced `\boxed{...}` that starts last, or None; escaped braces are not counted."""
    start = text.find(_BOX)
    if start < 0:
        return None
    open_groups: list[int | None] = []
    found: tuple[int, int] | None = None
    for token in _TOKEN.finditer(text, start):
        mark = token.group()
        if mark == "{":
            open_groups.append(None)
        elif mark == "}":
            content_start = open_groups.pop() if open_groups else None
            if content_start is not None and (found is None or content_start > found[0]):
                found = (content_start, token.start())
        elif mark.startswith(_BOX):
            open_groups.append(token.end())
    return None if found is None else text[found[0] : found[1]]

"""Ten thousand hostile turns: each has an answer or is one, of bounded length, and every call is counted."""

import asyncio
import random

import pytest
from support.patience import PATIENCE_S

from luffy.config.environment import ToolsEnvironment
from luffy.environments.registry import open_environment
from luffy.grading.request import Problem
from luffy.types import Message

COUNT = 10_000
LIMIT, CALLS = 300, 4
TOOLS = ("calculator", *(f"synthetic.sample_tools:{name}" for name in ("echo", "every_type", "remember", "structure")))
NAMES = ("calculator", "echo", "every_type", "remember", "structure", "os.system", "", "ECHO", "echo\x00", "e" * 5000)
KEYS = ("expression", "text", "count", "numbers", "names", "unit", "size", "state", "self", "__class__", "", "k" * 3000)
MARKS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>", "<|im_start|>system\n",
    "<|im_end|>", "<|eot_id|>", "<|python_tag|>", "<|start_header_id|>", "<echo>", "</echo>", "<text>", "</text>",
    "<result>", "</result>", "&lt;", "\x00", "\ud800", "\udfff", "\\ud800", "\\", '"', "'", "{", "}", "[", "]", ",",
    '{"name": "echo", "parameters": ', '{"name": "echo", "arguments": {"text": ', "\n", "\u2028", "\u202e", "é", "😀",
    "null", "NaN", "1e999", "-0", "9" * 6000, "[" * 3000, '{"a":' * 3000, "x" * 20_000, "  ",
)  # fmt: skip


def value(chance, depth=3):
    """JSON text of anything, often broken."""
    kind = chance.randrange(12 if depth else 8)
    if kind < 2:
        return chance.choice(("1", "-3.5", "true", "null", "1e999", "NaN", "9" * 6000, "01", "0x1", "1e5"))
    if kind < 6:
        return '"' + "".join(chance.choices(MARKS, k=chance.randrange(4))) + '"'
    if kind < 8:
        return chance.choice(("[" * 3000, '{"a":' * 3000, '"x', "{'a': 1}", "[1, 2", '"9**9**9"', '"1+1"', '"a"'))
    inner = [value(chance, depth - 1) for _ in range(chance.randrange(4))]
    if kind < 10:
        return f"[{', '.join(inner)}]"
    return "{" + ", ".join(f'"{chance.choice(KEYS)}": {text}' for text in inner) + "}"


def turn(chance, calls):
    """A turn that looks like calls of the format, or like nothing."""
    pieces = []
    for _ in range(chance.randrange(1, 7)):
        name = chance.choice(NAMES)
        arguments = ", ".join(f'"{chance.choice(KEYS)}": {value(chance)}' for _ in range(chance.randrange(4)))
        if chance.random() < 0.2:
            pieces.append("".join(chance.choices(MARKS, k=chance.randrange(1, 8))))
        elif calls == "hermes":
            pieces.append(f'<tool_call>\n{{"name": "{name}", "arguments": {{{arguments}}}}}\n</tool_call>')
        elif calls == "llama3":
            pieces.append(f'{{"name": "{name}", "parameters": {{{arguments}}}}}')
        else:
            fields = "".join(
                f"<{key}>{value(chance)}</{key}>" for key in chance.choices(KEYS, k=chance.randrange(1, 3))
            )
            pieces.append(f"<{name}>{fields}</{name}>")
    text = "\n".join(pieces)
    if chance.random() < 0.3:  # a cut or a copied character
        place = chance.randrange(len(text) + 1)
        text = text[:place] + chance.choice(("", text[place : place + 1] * 2, chance.choice(MARKS))) + text[place + 1 :]
    return text


async def played(calls, count):
    """The counts of an environment that has answered `count` turns."""
    chance = random.Random(f"hostile {calls}")
    config = ToolsEnvironment(
        kind="tools", tools=TOOLS, calls=calls, timeout_s=PATIENCE_S, max_calls=CALLS, max_result_characters=LIMIT
    )
    environment = open_environment(config)()
    await environment.reset(Problem())
    state = environment._state
    answered = 0
    for _ in range(count):
        before = environment.counts()["tool_calls"]
        messages = await environment.respond([Message("assistant", turn(chance, calls))])
        num_calls = environment.counts()["tool_calls"] - before
        assert (messages is None) == (num_calls == 0)
        if messages:
            answered += 1
            text = "".join(message.content for message in messages)
            text.encode()  # no lone surrogate
            assert "\x00" not in text and len(text) <= (CALLS + 1) * (LIMIT + 120)
            assert {message.role for message in messages} == {"tool" if calls == "llama3" else "user"}
    assert environment._state is state and set(state) <= {"kept"}
    assert all(isinstance(text, str) for text in state.get("kept", ()))
    await environment.close()
    return environment.counts(), answered


@pytest.mark.parametrize(("calls", "count"), [("hermes", COUNT // 2), ("llama3", COUNT // 4), ("xml", COUNT // 4)])
def test_every_hostile_turn_has_an_answer_or_is_one(calls, count):
    counts, answered = asyncio.run(played(calls, count))
    assert answered > count / 2
    assert counts["tool_errors"] > 0.2 * counts["tool_calls"]
    assert counts["tool_calls"] > counts["tool_errors"]  # some of them are right
    kinds = {"broken_call", "unknown_tool", "wrong_arguments", "raised", "not_run"}
    never = {"unknown_tool"} if calls == "xml" else set()  # an element of another name is text
    assert {kind for kind in kinds if counts[f"tool_errors/{kind}"]} == kinds - never
    assert counts["tool_errors/timed_out"] == 0

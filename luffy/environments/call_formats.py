r"""Formats of tool calls: how the policy writes calls, and how tools and results are shown to it.

    syntax = CALL_FORMATS["hermes"]
    syntax.instructions(tools)                      # for the system message
    syntax.parse(turn)                              # [ToolCall("calculator", {"expression": "1+1"})]
    syntax.results(["2"])                           # [Message("user", "<tool_response>\n2\n</tool_response>")]

Parsing takes time in proportion to the turn's length and never raises: what cannot be read is a `BrokenCall`.
Text between `<think>` and `</think>`, or after an unclosed `<think>`, holds no calls. These tags may occur inside the
arguments of a call.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from luffy.config.environment import CallFormat
from luffy.environments.tool_functions import Schema
from luffy.grading.extract import THINK_CLOSE, THINK_OPEN
from luffy.json_text import refuse_deep
from luffy.types import Message

Tools = Mapping[str, Schema]
"""The tools by name, in the form of OpenAI's protocol."""
_MOST_READ = 1000
"""Calls that are read in one turn, reasoning included; what follows them is ignored. Bounds the time of parsing."""
_MOST_DIGITS = 1000
"""Digits of a whole number."""
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it; the arguments have not been checked."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """Text that was meant as a call but cannot be parsed."""

    reason: str
    """What is wrong with it, in words for the policy."""


FoundCall = ToolCall | BrokenCall
_Reading = tuple[FoundCall, int]
"""A call, and the position in the turn where parsing continues."""


class HermesCalls:
    """The format of Hermes 2 Pro and later, and of Qwen 2.5 and 3, byte for byte as Qwen2.5's chat template writes it
    for `tools`.

    With a system message the template joins the two by a blank line.
    """

    _OPENING = re.compile(f"{THINK_OPEN}|{THINK_CLOSE}|<tool_call>")
    _CLOSING = re.compile(r"\s*</tool_call>")
    _END_OF_BROKEN = re.compile(f"(?={THINK_CLOSE})|</tool_call>")

    def instructions(self, tools: Tools) -> str:
        """Return the text that describes the tools to the policy."""
        signatures = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in tools.values())
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{signatures}</tools>"
            "\n\nFor each function call, return a json object with function name and arguments within "
            '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
            "<args-json-object>}\n</tool_call>"
        )

    def parse(self, turn: str) -> list[FoundCall]:
        """Return the calls of a turn in order; none where the turn is an answer."""
        return _found(turn, self._OPENING, self._read)

    def results(self, results: Sequence[str]) -> list[Message]:
        """Return the messages that answer a turn, given one result for each call."""
        # A tool's output cannot end its result early.
        texts = (result.replace("</tool_response>", "<\\/tool_response>") for result in results)
        return [Message("user", "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts))]

    def _read(self, turn: str, opening: re.Match[str]) -> _Reading:
        # A call that cannot be read ends here: what it quotes is no call. Reasoning that the prompt opened may mention
        # the tag, so its end is never passed over.
        broken = self._END_OF_BROKEN.search(turn, opening.end())
        resume = len(turn) if broken is None else broken.end()
        call, end = _read_json_call(turn, opening.end(), "arguments", resume)
        if isinstance(call, BrokenCall):
            return call, end
        closing = self._CLOSING.match(turn, end)
        if closing is None:
            return BrokenCall("</tool_call> has to follow the JSON object"), end
        return call, closing.end()


class Llama3Calls:
    """The JSON calls of Llama 3.1 and 3.2: an object that begins with the key `name`, anywhere in the turn.

    The instructions are those of the chat template for tools in the system message, where they stand before the
    system's own text and not, as here, after it. Results have the role `tool`, which the template writes as `ipython`.
    """

    _OPENING = re.compile(THINK_OPEN + "|" + THINK_CLOSE + r'|<\|python_tag\|>(?!\s*\{\s*"name"\s*:)|\{\s*"name"\s*:')

    def instructions(self, tools: Tools) -> str:
        signatures = "\n\n".join(json.dumps(tool, indent=4, ensure_ascii=False) for tool in tools.values())
        return (
            "You have access to the following functions. To call a function, please respond with JSON for a function "
            'call.Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
            f"value}}.Do not use variables.\n\n{signatures}"
        )

    def parse(self, turn: str) -> list[FoundCall]:
        return _found(turn, self._OPENING, self._read)

    def results(self, results: Sequence[str]) -> list[Message]:
        return [Message("tool", result) for result in results]

    def _read(self, turn: str, opening: re.Match[str]) -> _Reading:
        start = opening.start() if opening.group().startswith("{") else opening.end()
        line_end = turn.find("\n", opening.end())  # an object inside a broken one is not a call
        return _read_json_call(turn, start, "parameters", resume=line_end if line_end >= 0 else len(turn))


CallSyntax = HermesCalls | Llama3Calls
CALL_FORMATS: Mapping[CallFormat, CallSyntax] = {"hermes": HermesCalls(), "llama3": Llama3Calls()}


def _found(turn: str, opening: re.Pattern[str], read: Callable[[str, re.Match[str]], _Reading]) -> list[FoundCall]:
    """The calls outside of reasoning; `opening` finds the tags of reasoning and where a call begins."""
    found: list[FoundCall] = []
    position, num_read = 0, 0
    while num_read < _MOST_READ and (mark := opening.search(turn, position)):
        position = mark.end()
        if mark.group() == THINK_OPEN:
            end = turn.find(THINK_CLOSE, position)
            if end < 0:
                break
            position = end + len(THINK_CLOSE)
        elif mark.group() == THINK_CLOSE:
            found.clear()  # the reasoning was opened by the prompt: all until here belongs to it
        else:
            call, position = read(turn, mark)
            found.append(call)
            num_read += 1
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _finite(written: str) -> float:
    if math.isinf(value := float(written)):
        raise ValueError("a number is too large")
    return value


def _whole(written: str) -> int:
    if len(written) > _MOST_DIGITS:
        raise ValueError(f"a number has more than {_MOST_DIGITS} digits")
    return int(written)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_int=_whole, parse_constant=_no_constant
)


def _read_json_call(text: str, start: int, key: str, resume: int) -> _Reading:
    """The call `{"name": ..., KEY: {...}}` at `start`; reading goes on at `resume` where it is not JSON."""
    space = _SPACE.match(text, start)
    start = space.end() if space else start
    try:
        refuse_deep(text, start)
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return BrokenCall(f"it is not JSON: {error.msg} (character {error.pos - start} of the JSON)"), resume
    except ValueError as error:
        return BrokenCall(f"it is not JSON: {error}"), resume
    if isinstance(value, dict) and value.keys() == {"name", key}:
        name, arguments = value["name"], value[key]
        if isinstance(name, str) and isinstance(arguments, dict):
            return ToolCall(name, arguments), end
    return BrokenCall(f'a call is a JSON object {{"name": "...", "{key}": {{...}}}} with these two keys alone'), end

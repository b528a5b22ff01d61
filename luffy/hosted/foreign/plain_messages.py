"""Messages, tools and turns in the form in which they travel between the two interpreters."""

from typing import Any

from luffy.hosted.foreign.faults import EpisodeFault

PlainMessage = dict[str, str]
"""`role` and `content`."""
Turn = dict[str, Any]
"""A turn of the policy: `text`, `calls` (each with `name` and `arguments`, a text), and `is_cut`."""


def plain(message: Any) -> PlainMessage:
    """Role and text of a message; EpisodeFault if it holds more than text."""
    message = message if isinstance(message, dict) else message.model_dump()
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
        if any(not isinstance(part.get("text"), str) for part in parts):
            raise EpisodeFault("a message of the environment holds more than text")
        content = "".join(part["text"] for part in parts)
    return {"role": str(message["role"]), "content": content or ""}


def plain_tool(tool: Any) -> dict[str, Any]:
    """A tool in the form of OpenAI's protocol."""
    tool = tool if isinstance(tool, dict) else tool.model_dump()
    function = tool.get("function", tool)
    kept = {key: function[key] for key in ("name", "description", "parameters") if key in function}
    return {"type": "function", "function": kept}


def chat_completion(turn: Turn) -> dict[str, Any]:
    """A turn as the body of a response of OpenAI's protocol; the text keeps the calls."""
    functions = [
        {
            "id": f"call_{place}",
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for place, call in enumerate(turn["calls"])
    ]
    message = {"role": "assistant", "content": turn["text"], "tool_calls": functions or None}
    choice = {"index": 0, "finish_reason": finish_reason(turn), "message": message}
    return {"id": "turn", "created": 0, "model": "policy", "object": "chat.completion", "choices": [choice]}


def finish_reason(turn: Turn) -> str:
    """Why a turn ended, in the terms of OpenAI's protocol."""
    return "length" if turn["is_cut"] else "tool_calls" if turn["calls"] else "stop"

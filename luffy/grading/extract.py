r"""Where the final answer of a response is: the last `\boxed{...}` outside the reasoning.

Everything here is linear in the length of the response, whatever it holds.
"""

import re

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_BOX = r"\boxed"

# Alternatives that cannot overlap and a possessive quantifier: no input makes this backtrack. `\\boxed` (a doubled
# backslash, common in model output) still opens a box.
_TOKEN = re.compile(r"\\boxed\s*+\{|\\[{}]|\\\\(?!boxed)|[{}]")


def extract_answer(response: str) -> str | None:
    """Return the content of the last balanced box of the final reply, stripped; None where there is no answer.

    Reasoning that was opened and never closed means that the response has no final reply. A response may also close
    a `<think>` that its prompt opened.
    """
    reply = final_reply(response)
    if reply is None:
        return None
    return (last_box(reply) or "").strip() or None


def final_reply(response: str) -> str | None:
    """Return what follows the last `</think>` (everything without one), or None while reasoning is still open."""
    opened, closed = response.rfind(THINK_OPEN), response.rfind(THINK_CLOSE)
    if opened > closed:
        return None
    return response if closed < 0 else response[closed + len(THINK_CLOSE) :]


def last_box(text: str) -> str | None:
    r"""Return the content of the balanced `\boxed{...}` that starts last, or None; escaped braces do not count."""
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

"""The lines that pass between a session and its interpreter."""

import json

from hypothesis import given
from hypothesis import strategies as st

from luffy.sandbox.interpreter import REPLIES, reply_line, request_line

any_text = st.text(st.characters())  # lone surrogates included


@given(any_text)
def test_any_code_is_one_line_of_ascii(code: str) -> None:
    line = request_line("0123", code)
    assert line.isascii() and line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line) == ["0123", code]


def test_replies_to_different_calls_differ() -> None:
    replies = {reply_line(call, status) for call in ("a", "b") for status in REPLIES}
    assert len(replies) == 2 * len(REPLIES)
    assert all(reply.count(b"\n") == 1 for reply in replies)

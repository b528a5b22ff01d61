"""The lines between a session and its interpreter, and what is kept of a call's output."""

import json

from hypothesis import given
from hypothesis import strategies as st

from luffy.sandbox.interpreter import REPLIES, reply_line, request_line
from luffy.sandbox.interpreter_session import PrintedOutput

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


def printed(chunks: list[bytes], shown_bytes: int) -> PrintedOutput:
    output = PrintedOutput(shown_bytes)
    for chunk in chunks:
        output.add(chunk)
    return output


@given(st.lists(st.binary(max_size=40)), st.integers(64, 100))
def test_the_start_and_the_end_are_kept_however_the_bytes_arrive(chunks: list[bytes], shown_bytes: int) -> None:
    chunks = [bytes(byte % 128 for byte in chunk) for chunk in chunks]
    everything = b"".join(chunks)
    text = printed(chunks, shown_bytes).text()
    if len(everything) <= shown_bytes:
        assert text == everything.decode()
        return
    half = shown_bytes // 2
    head, tail = everything[:half].decode(), everything[half - shown_bytes :].decode()
    assert text == f"{head}\n[... {len(everything) - shown_bytes} bytes of output left out ...]\n{tail}"


@given(st.text(min_size=100), st.integers(64, 99))
def test_no_character_is_cut_in_half(text: str, shown_bytes: int) -> None:
    whole = text.encode(errors="replace").decode()
    output = printed([whole.encode()], shown_bytes)
    head, _, rest = output.text().partition("\n[... ")
    assert whole.startswith(head)
    assert whole.endswith(rest.partition(" bytes of output left out ...]\n")[2])
    assert whole.startswith(output.start())


def test_bytes_that_are_no_text_are_replaced_and_memory_stays_bounded():
    assert printed([b"a\xff", b"\xe2\x82"], 64).text() == "a\ufffd\ufffd"
    assert printed([b"\xff" * 200], 64).start() == "\ufffd" * 32
    assert printed(["é".encode()[:1], "é".encode()[1:]], 64).text() == "é"
    output = PrintedOutput(64)
    for _ in range(1000):
        output.add(b"x" * 1000)
        assert len(output._head) + len(output._tail) < 64 + 2 * 1000
    assert output.size == 1_000_000

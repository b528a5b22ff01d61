"""Messages with their middle left out, told from those that are not of the same whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.data.cut_messages import cut, is_cut_from


@given(st.text(), st.text(), st.text())
def test_a_message_that_was_cut_is_recognised(start: str, middle: str, end: str) -> None:
    assert is_cut_from(cut(start, len(middle), "characters", end), start + middle + end)


def test_a_character_broken_at_the_cut_and_changed_white_space_do_not_matter() -> None:
    assert is_cut_from(cut("a  é\ufffd", 3, "tokens", "\ufffd b\nc"), "a é€€€ b c")
    assert is_cut_from(cut("e\u0301", 3, "tokens", "\n\n").strip(), "éabc\n\n")


@pytest.mark.parametrize("whole", ["ab", "abxcd?", "?abxcd", "abd", ""])
def test_another_message_is_not(whole: str) -> None:
    assert not is_cut_from(cut("ab", 1, "tokens", "cd"), whole)
    assert not is_cut_from("abcd", "abcd")  # without a mark it is cut from nothing


def test_a_message_that_shows_such_a_mark_itself_can_be_cut() -> None:
    whole = "log: " + cut("a", 1, "tokens", "b") + " and much more"
    assert is_cut_from(cut(whole[:30], 2, "characters", whole[32:]), whole)

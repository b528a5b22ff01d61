"""What environments of one's own read a turn with."""

import pytest

from luffy.environments import after_thinking, xml_fields


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("plain", "plain"),
        ("<think>never closed", ""),
        ("<think>a</think>b<think>again", ""),
        ("", ""),
    ],
)
def test_only_the_text_after_the_reasoning_is_left(turn, reply):
    assert after_thinking(turn) == reply


def test_fields_are_the_first_elements_of_their_names():
    text = "<reasoning>\nwhy\n</reasoning>\n<code>x = 1</code><code>second</code><empty></empty><open>"
    assert xml_fields(text, ["reasoning", ("code", "answer"), "empty", "open"]) == {
        "reasoning": "why",
        "code": "x = 1",
        "answer": None,
        "empty": "",
        "open": None,
    }

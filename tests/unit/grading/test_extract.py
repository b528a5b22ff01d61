"""Where the answer of a response is found."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.grading.extract import boxed_answer, final_reply


def extract_answer(response: str) -> str | None:
    reply = final_reply(response)
    return None if reply is None else boxed_answer(reply)


_balanced = st.recursive(
    st.text(alphabet="abc0189+-^_ =,.", max_size=6),
    lambda inner: st.one_of(
        st.builds(lambda text: "{" + text + "}", inner),
        st.builds(lambda left, right: left + right, inner, inner),
        st.just(r"\{"),
        st.just(r"\}"),
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{52}", "52"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {  7 }", "7"),
        (r"\\boxed{5}", "5"),
        (r"\boxed{3}, and then \boxed{4", "3"),
        (r"}} \boxed{8}", "8"),
        (r"\boxed{a \\ b}", r"a \\ b"),
        (r"\boxed{\boxed{6}}", "6"),
        (r"\boxed{}", None),
        (r"\boxed{1} \boxed{ }", None),
        (r"\boxed{9", None),
        (r"\boxed 9", None),
        ("the answer is 9", None),
        ("", None),
        ("<think>\n\\boxed{1}\n</think>\n\\boxed{2}", "2"),
        ("<think>\n\\boxed{1}\n</think>\nI forgot", None),
        ("<think>\n\\boxed{1}", None),
        ("<think></think>\\boxed{1}<think> wait", None),
        ("reasoning \\boxed{1} </think> \\boxed{2}", "2"),
        ("</think> \\boxed{1} </think> \\boxed{2}", "2"),
    ],
)
def test_the_last_balanced_box_of_the_reply_after_the_reasoning_counts(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


@given(before=st.text(alphabet="ab{} ", max_size=10), content=_balanced, after=st.text(alphabet="ab{ ", max_size=10))
def test_any_balanced_content_is_returned_whole(before: str, content: str, after: str) -> None:
    assert extract_answer(f"{before}\\boxed{{{content}}}{after}") == (content.strip() or None)


@given(st.text(alphabet="\\boxed{}<think>/ 1", max_size=200))
def test_no_text_breaks_the_extraction(response: str) -> None:
    answer = extract_answer(response)
    assert answer is None or (answer == answer.strip() and answer in response)


@pytest.mark.parametrize("unit", ["\\boxed{", "{", "}", "\\", "<think>", "\\boxed ", " ", "\\boxed{1}", "a"])
def test_a_million_characters_take_linear_time(unit: str) -> None:
    response = "\\boxed{" + unit * (1_000_000 // len(unit))
    started = time.process_time()
    extract_answer(response)
    assert time.process_time() - started < 3.0


def test_huge_nesting_is_returned_whole() -> None:
    content = "{" * 200_000 + "1" + "}" * 200_000
    assert extract_answer(f"\\boxed{{{content}}}") == content

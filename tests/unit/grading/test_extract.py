"""Where the answer of a response is found."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.installed import DATASETS, needs_datasets

from luffy.config.grading import GraderKind, MathGrader, StrictMathGrader
from luffy.grading.extract import boxed_answer, final_reply, marked_answer, plain_answer
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest
from luffy.types import Outcome

GSM8K = DATASETS / "gsm8k" / "test.jsonl"


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


@pytest.mark.parametrize(
    "unit", ["\\boxed{", "{", "}", "\\", "<think>", "\\boxed ", " ", "\\boxed{1}", "a", "$1 a ", "\n#### "]
)
def test_a_million_characters_are_read(unit: str) -> None:
    """In time that grows with the square of the length, this would outlast pytest's limit."""
    response = "\\boxed{" + unit * (1_000_000 // len(unit))
    assert extract_answer(response) == ("1" if unit == "\\boxed{1}" else None)
    assert (plain_answer(response) is None) == ("1" not in unit)


def test_huge_nesting_is_returned_whole() -> None:
    content = "{" * 200_000 + "1" + "}" * 200_000
    assert extract_answer(f"\\boxed{{{content}}}") == content


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("9 * 2 = $<<9*2=18>>18 a day.\n#### 18", "18"),
        ("#### 17\nNo:\n#### -1,234.5 \n\n", "-1,234.5"),
        (r"#### \frac{1}{2}", r"\frac{1}{2}"),
        ("#### $5", "$5"),
        ("#### 18 dollars per day", "18 dollars per day"),
        ("#### 3. compute the sum", None),
        (r"\boxed{17}" + "\n#### 18", "17"),
        # Headings, and lines that are not the last.
        ("#### 18\nThat is the price of 3.", None),
        ("#### Conclusion", None),
        ("#### 3. Compute the sum", None),
        ("### 18", None),
        ("##### 18", None),
        ("it is #### 18", None),
        ("####", None),
    ],
)
def test_a_last_line_of_four_hashes_marks_an_answer_where_no_box_does(reply: str, answer: str | None) -> None:
    found = marked_answer(reply)
    assert (found and found.answer) == answer


@pytest.mark.parametrize(
    ("reply", "answer", "sign"),
    [
        ("He sells 9 eggs for $2 each, $18 a day.", "18", "the last number"),
        ("She pays $5 and then $6.", "6", "the last number"),
        ("It costs $2*3=$6 in all, with 7 left", "7", "the last number"),
        (r"At \$5 and \$6 the price is 11.", "11", "the last number"),
        ("At $5 for a ticket $x=7$ of 9", "x=7", "the last formula"),
        ("A room at $n$ for $9", "9", "the last number"),
        # Formulas that begin with a number.
        ("So it is $18$ of 19.", "18", "the last formula"),
        ("so $ 2x $ of 9", "2x", "the last formula"),
        (r"so $5 \text{ cm}$ of 9", r"5 \text{ cm}", "the last formula"),
        (r"so \(3\), \[4\] of 9", "4", "the last formula"),
    ],
)
def test_an_amount_of_money_is_no_formula(reply: str, answer: str, sign: str) -> None:
    assert plain_answer(reply) == (answer, sign)


@needs_datasets
@pytest.mark.parametrize("kind", [MathGrader(), MathGrader(boxed="preferred"), StrictMathGrader()])
def test_reference_solutions_of_gsm8k_are_right_and_altered_ones_wrong(pool: GraderPool, kind: GraderKind) -> None:
    solutions = [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    golds = [solution.rpartition("#### ")[2] for solution in solutions]
    right = [GradeRequest(solution, gold, kind=kind) for solution, gold in zip(solutions, golds, strict=True)]
    altered = [replace(request, response=f"{request.response}1") for request in right]
    assert len(right) == 1319
    assert {grade.outcome for grade in pool.grade(right)} == {Outcome.CORRECT}
    assert {grade.outcome for grade in pool.grade(altered)} == {Outcome.WRONG}

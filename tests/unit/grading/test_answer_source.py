"""Where the answer of a response is found: it is the model's final one, never one of the prompt or of the reasoning."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic.graders import CHOICE, EXACT, EXACT_BOX, MATH, PREFERRED, STRICT, any_of, both_of, weighted

from luffy.data.prompt_templates import prompt_text
from luffy.grading.extract import boxed_answer, final_reply, marked_answer, plain_answer
from luffy.grading.request import GradeRequest, Problem, problem_of
from luffy.types import Message, Outcome, Prompt

COMBINED = any_of(PREFERRED, CHOICE), both_of(MATH, STRICT), weighted((1.0, MATH))
KINDS = [MATH, PREFERRED, STRICT, EXACT_BOX, CHOICE, *COMBINED]
OPTIONS = {"options": ["one", "two", "three", "four"]}
WAYS = (r"\boxed{%s}", "the answer is %s", "ANSWER: %s", "<answer>%s</answer>", r"\boxed{\text{%s}}", "Answer: (%s)")

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
way_to_answer = st.sampled_from(WAYS)
letter = st.sampled_from("ABCD")
filler = st.text(alphabet="xyz ,.\n<>/{}\\$", max_size=30)
balanced = st.recursive(
    st.text(alphabet="abc0189+-^_ =,.", max_size=6),
    lambda inner: st.one_of(
        st.builds(lambda text: "{" + text + "}", inner),
        st.builds(lambda left, right: left + right, inner, inner),
        st.just(r"\{"),
        st.just(r"\}"),
    ),
    max_leaves=12,
)


def extract_answer(response):
    reply = final_reply(response)
    return None if reply is None else boxed_answer(reply)


@pytest.mark.parametrize(("response", "answer"), [
    (r"so \boxed{52}", "52"), (r"\boxed{1} or rather \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed {  7 }", "7"), (r"\\boxed{5}", "5"), (r"}} \boxed{8}", "8"),
    (r"\boxed{3}, and then \boxed{4", "3"), (r"\boxed{a \\ b}", r"a \\ b"), (r"\boxed{\boxed{6}}", "6"),
    *((response, None) for response in (r"\boxed{}", r"\boxed{1} \boxed{ }", r"\boxed{9", r"\boxed 9")),
    *((response, None) for response in ("the answer is 9", "", "<think>\n\\boxed{1}")),
    ("<think>\n\\boxed{1}\n</think>\n\\boxed{2}", "2"), ("<think>\n\\boxed{1}\n</think>\nI forgot", None),
    ("<think></think>\\boxed{1}<think> wait", None), ("reasoning \\boxed{1} </think> \\boxed{2}", "2"),
    ("</think> \\boxed{1} </think> \\boxed{2}", "2"),
    pytest.param(f"\\boxed{{{'{' * 200_000}1{'}' * 200_000}}}", "{" * 200_000 + "1" + "}" * 200_000, id="nested"),
])  # fmt: skip
def test_the_last_balanced_box_of_the_reply_after_the_reasoning_counts(response, answer):
    assert extract_answer(response) == answer


@given(
    before=st.text(alphabet="ab{} ", max_size=10), content=balanced, after=st.text(alphabet="ab{ ", max_size=10),
    anything=st.text(alphabet="\\boxed{}<think>/ 1", max_size=200),
)  # fmt: skip
def test_any_balanced_content_is_returned_whole_and_no_text_breaks_the_extraction(before, content, after, anything):
    assert extract_answer(f"{before}\\boxed{{{content}}}{after}") == (content.strip() or None)
    answer = extract_answer(anything)
    assert answer is None or (answer == answer.strip() and answer in anything)


@pytest.mark.parametrize(
    "unit", ["\\boxed{", "{", "}", "\\", "<think>", "\\boxed ", " ", "\\boxed{1}", "a", "$1 a ", "\n#### "]
)
def test_a_million_characters_are_read(unit):
    """In time that grows with the square of the length, this would outlast pytest's limit."""
    response = "\\boxed{" + unit * (1_000_000 // len(unit))
    assert extract_answer(response) == ("1" if unit == "\\boxed{1}" else None)
    assert (plain_answer(response) is None) == ("1" not in unit)


@pytest.mark.parametrize(("reply", "answer"), [
    ("9 * 2 = $<<9*2=18>>18 a day.\n#### 18", "18"), ("#### 17\nNo:\n#### -1,234.5 \n\n", "-1,234.5"),
    (r"#### \frac{1}{2}", r"\frac{1}{2}"), ("#### $5", "$5"), ("#### 18 dollars per day", "18 dollars per day"),
    (r"\boxed{17}" + "\n#### 18", "17"),
    # Headings, and lines that are not the last.
    *((reply, None) for reply in ("#### Conclusion", "#### 3. Compute the sum", "#### 3. compute the sum")),
    *((reply, None) for reply in ("#### 18\nThat is the price of 3.", "it is #### 18")),
    *((reply, None) for reply in ("### 18", "##### 18", "####")),
])  # fmt: skip
def test_a_last_line_of_four_hashes_marks_an_answer_where_no_box_does(reply, answer):
    found = marked_answer(reply)
    assert (found and found.answer) == answer


@pytest.mark.parametrize(("reply", "answer", "sign"), [
    ("He sells 9 eggs for $2 each, $18 a day.", "18", "number"), ("She pays $5 and then $6.", "6", "number"),
    ("It costs $2*3=$6 in all, with 7 left", "7", "number"), (r"At \$5 and \$6 the price is 11.", "11", "number"),
    ("At $5 for a ticket $x=7$ of 9", "x=7", "formula"), ("A room at $n$ for $9", "9", "number"),
    # Formulas that begin with a number.
    ("So it is $18$ of 19.", "18", "formula"), ("so $ 2x $ of 9", "2x", "formula"),
    (r"so $5 \text{ cm}$ of 9", r"5 \text{ cm}", "formula"), (r"so \(3\), \[4\] of 9", "4", "formula"),
])  # fmt: skip
def test_an_amount_of_money_is_no_formula(reply, answer, sign):
    assert plain_answer(reply) == (answer, f"the last {sign}")


@pytest.mark.parametrize("kind", [MATH, PREFERRED, STRICT, EXACT, EXACT_BOX, CHOICE])
@pytest.mark.parametrize(("reply", "in_tag", "is_right"), [
    ("so <answer> 3 </answer>", True, True), (r"\boxed{4} <answer>3</answer>", True, True),
    (r"<answer>3</answer> or \boxed{4}", True, True), (r"<answer>it is \boxed{3}</answer>", True, True),
    (r"so \boxed{3}", True, True), ("<answer>3</answer> <answer>4</answer>", True, False),
    (r"\boxed{3} <answer>4</answer>", True, False), (r"<answer>3</answer> \boxed{4}", False, False),
    # A prompt that is not known: the form of the reply decides.
    ("<answer>3</answer>", None, True), (r"<answer>3</answer> \boxed{4}", None, False),
])  # fmt: skip
def test_the_prompt_decides_where_an_answer_stands(pool, kind, reply, in_tag, is_right):
    (found,) = pool.grade([GradeRequest(f"<think>4</think> {reply}", "3", Problem(in_tag=in_tag), kind)])
    assert (found.outcome is Outcome.CORRECT) == is_right


@pytest.mark.parametrize("kind", [MATH, STRICT])
@pytest.mark.parametrize(("reply", "in_tag"), [
    ("so <answer>3</answer>", None), ("<answer>3</answer>", False), ("<answer>3", True), ("<answer></answer>", True),
])  # fmt: skip
def test_other_tags_mark_no_answer(pool, kind, reply, in_tag):
    (found,) = pool.grade([GradeRequest(f"<think>3</think> {reply}", "3", Problem(in_tag=in_tag), kind)])
    assert found.outcome is Outcome.NO_ANSWER


@pytest.mark.parametrize(("template", "in_tag"), [("r1_zero", True), ("qwen_math", False), ("prime", None)])
def test_a_template_tells_where_it_wants_the_answer(template, in_tag):
    prompt = Prompt("uid", "test", (Message("user", "What is 1 + 2?"),), "3")
    assert problem_of(prompt, prompt_text(prompt, template)).in_tag is in_tag
    assert problem_of(prompt).in_tag is None
    asking = replace(prompt, messages=(Message("system", "End with <answer>NUMBER</answer>."), *prompt.messages))
    assert problem_of(asking).in_tag is True


def shown_problem(*messages):
    shown = tuple(Message(role, content) for role, content in messages)
    return problem_of(Prompt("uid", "test", shown, "B", extra_info=dict(OPTIONS)))


def grade(pool, kind, response, gold, question=""):
    return pool.grade([GradeRequest(response, gold, Problem(question, extra_info=OPTIONS), kind)])[0]


@every_kind
@given(way=way_to_answer, before=filler, between=filler, opened=st.booleans(), gold=letter, other=letter)
@settings(max_examples=60, deadline=None)
def test_an_answer_in_the_reasoning_earns_nothing_and_the_reply_overrules_it(
    pool, kind, way, before, between, opened, gold, other
):
    thoughts = f"{before}{way % gold}{between}"
    closed = ("<think>" if opened else "") + thoughts + "</think>"
    for response in (closed, closed + "\nHm.", closed + closed, "<think>" + thoughts):
        found = grade(pool, kind, response, gold)
        assert found.outcome is not Outcome.CORRECT
        assert found.reward == 0
        assert found.reason
    found = grade(pool, kind, f"<think>{way % gold}</think> so \\boxed{{{other}}}", gold)
    assert (found.outcome is Outcome.CORRECT) == (gold == other)


@every_kind
@given(way=way_to_answer, between=filler, gold=letter)
@settings(max_examples=40, deadline=None)
def test_an_answer_in_the_prompt_earns_nothing(pool, kind, way, between, gold):
    question = f"Solve it. Example: {way % gold}. {between} Now yours:"
    for response in (question, f"<think>hm</think>\n{question}\n", f"{question}{question}"):
        assert grade(pool, kind, response, gold, question).outcome is not Outcome.CORRECT


@every_kind
@pytest.mark.parametrize("way", WAYS)
def test_an_answer_in_any_message_earns_nothing(pool, kind, way):
    system = f"End with the answer, as in: {way % 'B'}"
    earlier = f"An example. {way % 'B'}\nThat was it."
    said = f"I go through all four of them one by one, rule out the others, and so in the end {way % 'B'} it must be."
    problem = shown_problem(("system", system), ("user", earlier), ("assistant", said), ("user", "Which of the four?"))
    echoes = [system, earlier, said, f"{earlier}\n{system}", f"<think>hm</think>{system}{said}"]
    found = pool.grade([GradeRequest(echo, "B", problem, kind) for echo in echoes])
    assert Outcome.CORRECT not in {each.outcome for each in found}
    own = pool.grade([GradeRequest(f"{echo}\n\\boxed{{B}}", "B", problem, kind) for echo in echoes])
    assert {each.outcome for each in own} == {Outcome.CORRECT}


def test_a_message_within_another_goes_with_it_and_a_short_answer_from_an_earlier_turn_may_be_given_again(pool):
    problem = shown_problem(("system", r"Write \boxed{B}"), ("user", r"Write \boxed{B}, or else \boxed{A}."))
    assert pool.grade([GradeRequest(problem.question, "A", problem)])[0].outcome is Outcome.NO_ANSWER
    problem = shown_problem(("user", "The first?"), ("assistant", "The answer is (B)."), ("user", "And the second?"))
    assert pool.grade([GradeRequest("The answer is (B).", "B", problem, CHOICE)])[0].reward == 1

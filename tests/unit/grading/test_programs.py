"""Which block of a reply is the program, which test cases a reference holds, and which outputs agree."""

import json
from concurrent.futures import Future

import pytest

from luffy.config.grading import CodeGrader, GradingConfig
from luffy.grading.kinds import steps
from luffy.grading.pool import VerdictMemo
from luffy.grading.programs import CODE, Case, cases_of, last_program, same_output, same_value
from luffy.grading.request import Grade, GradeRequest, Problem, Verification
from luffy.sandbox.whole_program import plain
from luffy.types import Outcome


@pytest.mark.parametrize(("reply", "program"), [
    ("```python\nx\n```", "x\n"), ("```py\nx\n```\nand\n~~~~ Python3 title\ny\n~~~\n~~~~~\n", "y\n~~~\n"),
    ("```\nx\n```", "x\n"), ("```python\nx\n```\nIt prints\n```\n3\n```", "x\n"),
    ("```python\nx\n```\nIn C++:\n```cpp\ny\n```", "x\n"), ("1. So\n   ```python\n   x\n   ```", "   x\n"),
    ("```python\nprint('```')\n```", "print('```')\n"), ("```python\nx\n```\n```python\ny", "x\n"),
    *((reply, None) for reply in ("```cpp\nx\n```", "```python\nx", "a ```python x``` b", "print(3)")),
])  # fmt: skip
def test_the_last_closed_block_of_python_is_the_program(reply, program):
    assert last_program(reply) == program


BLOCK, OTHER = "```python\nx\n```", "```python\ny\n```"


@pytest.mark.parametrize(("response", "problem", "found"), [
    (f"<think>{OTHER}</think>{BLOCK}", Problem(), "x\n"), (f"<think>{BLOCK}", Problem(), Outcome.NO_ANSWER),
    (f"Complete {OTHER}", Problem(f"Complete {OTHER}"), Outcome.NO_ANSWER),
    (f"Here x = 12345.\n{BLOCK}\nx = 12345", Problem("x = 12345"), "x\n"),
    (f"<answer>{BLOCK}</answer> {OTHER}", Problem(in_tag=True), "x\n"), ("3", Problem(), Outcome.NO_ANSWER),
])  # fmt: skip
def test_a_program_stands_in_the_answer_and_is_not_that_of_the_question(response, problem, found):
    (step,) = steps(CodeGrader(), GradeRequest(response, "[]", problem))
    assert isinstance(step, Grade | Verification)
    assert (step.outcome if isinstance(step, Grade) else step.answer) == found


def test_rows_and_files_name_the_grader_code():
    grading = GradingConfig.model_validate({"kind": "code", "named": {"shares": {"kind": "code", "partial": True}}})
    assert grading.grader(None) == grading.grader("code") == CodeGrader()
    assert grading.grader("shares") == CodeGrader(partial=True)


@pytest.mark.parametrize(("reference", "cases"), [
    ({"inputs": ["1\n", ["2", "3"]], "outputs": [1, ["2"]]}, [Case("1\n", "", ["1"]), Case("2\n3", "", ["2"])]),
    ([{"input": "1", "output": "2", "testtype": "stdin"}], [Case("1", "", ["2"])]),
    ({"tests": [{"input": "1", "output": "2"}]}, [Case("1", "", ["2"])]),
    ({"test_cases": [{"type": "stdin_stdout", "input": "1", "output": "2"}]}, [Case("1", "", ["2"])]),
])  # fmt: skip
def test_cases_of_standard_input_and_output(reference, cases):
    assert cases_of(json.dumps(reference)) == cases


@pytest.mark.parametrize(("reference", "expected", "run"), [
    ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"}, [3], ""),
    ({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"}, [[3], 3], ""),
    ({"inputs": [[1, 2]], "outputs": [[3, 4]], "fn_name": "f"}, [[3, 4]], ""),
    ({"inputs": ["1\n2"], "outputs": ["[3]"], "fn_name": "f"}, [[3]], ""),
    ([{"input": "1\n2", "output": "3", "testtype": "functional"}], [3], ""),
    ([{"input": [1], "output": 3, "type": "function_call", "fn_name": "f"}], [3], ""),
    (["assert f(1) == {2, 1}"], [["set", "1", "2"]], ""),
    ({"test_list": ["assert f(1) == (1, 'a', None)"]}, [[1, "a", None]], ""),
    # Other assertions run beside the program.
    *(
        ({"assert_case": [test]}, [True], test)
        for test in ("assert f(1) < 2", "assert 2 == f(1)", "x = f(1)\nassert x == 2", "assert f(1) == x")
    ),
])  # fmt: skip
def test_what_a_call_has_to_return_stays_outside(reference, expected, run):
    (case,) = cases_of(json.dumps(reference))
    assert case.expected == expected
    assert case.then and (run in case.then if run else "== " not in case.then)


NO_CASES = ["", "3", "{}", "[]", "[3]", '{"inputs": "x"}', '["assert ("]', "[" * 200, '[{"input": "1"}]', '{"test": 3}']


@pytest.mark.parametrize(
    "reference",
    [*NO_CASES, '{"inputs": ["1"], "outputs": []}', '{"inputs": ["x"], "outputs": ["x"], "fn_name": "f"}'],
)
def test_a_reference_without_cases_is_said(reference):
    with pytest.raises(ValueError):
        cases_of(reference)


@pytest.mark.parametrize(
    ("expected", "same", "different"),
    [
        ("3\n", ["3"], []), ("3\n4", ["3 \n 4\n\n"], ["3\n\n4"]), ("a b", ["a  b"], []), ("0.50", ["0.5"], []),
        ("0.33333333", ["0.3333333"], ["0.3333"]), ("3.0", ["3"], []), ("1000", ["1e3"], []), ("", [""], []),
        ("1000000008", [], ["1000000007"]),
        ("123456789012345678902", [], ["123456789012345678901"]),
        ("3 4", [], ["3\n4", "34"]), ("YES", [], ["Yes"]), ("NaN", [], ["nan"]), ("10", [], ["1_0"]),
        ("3", [], ["３", ""]), ("1e999999998", [], ["1e999999999"]),
        ("9.8e9999999999999999999", [], ["9.9e9999999999999999999"]),
        ("0.0000002", [], ["0.0000001"]),
    ],
)  # fmt: skip
def test_outputs_are_compared_line_by_line_and_as_numbers(expected, same, different):
    assert [printed for printed in [*same, *different] if same_output(printed, expected)] == same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        ((1, 2), [1, 2], True), ({1: 2}, {"1": 2}, True), (0.1 + 0.2, 0.3, True), (3.0, 3, True),
        ({"a": [1.0]}, {"a": [1]}, True), ([1, 2], [2, 1], False), ("3", 3, False), (None, "None", False),
        (10**20, 10**20 + 1, False), (float("nan"), 0.5, False), (object, 1, False),
    ],
)  # fmt: skip
def test_values_are_compared_as_json(returned, expected, same):
    assert same_value(json.loads(plain(returned)), expected) is same


def test_a_program_that_timed_out_keeps_its_share_as_reward(tmp_path):
    """A file of time-outs would give it none after a stage is resumed."""
    work = Verification(CODE, "x", "[1]", "{}")
    memo = VerdictMemo(5.0, timeouts_file=tmp_path / "timed_out.txt")
    grade, verdict = Grade(Outcome.TIMED_OUT, own_reward=0.5), Future[Grade]()
    verdict.set_result(grade)
    memo.claim(work, lambda work: verdict)
    memo.settle(work, grade)
    again, is_new = memo.claim(work, lambda work: Future())
    assert (again.result().reward, is_new, list(tmp_path.iterdir())) == (0.5, False, [])


def test_the_same_program_for_another_problem_is_another_verification():
    first, second = (steps(CodeGrader(), GradeRequest(BLOCK, gold))[0] for gold in ("[1]", "[2]"))
    assert isinstance(first, Verification) and first.check == CODE
    assert first != second

"""The grader `code` with real sandboxes: right programs pass in every layout, and hostile ones are outcomes."""

import json
import os
from collections.abc import Iterator

import pytest
from support.refusals import refused
from support.sandboxed import PATIENT, processes_below, require_bubblewrap
from synthetic.hostile_programs import PROGRAMS, TIME

from luffy.config.execution import ExecutionConfig
from luffy.config.grading import CodeGrader, GradingConfig
from luffy.config.sandbox import AllOutputShown, SandboxConfig, SandboxLimits
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade, GradeRequest
from luffy.types import Outcome

pytestmark = pytest.mark.slow
SMALL = {
    **{"tmp_mib": 8, "file_mib": 4, "max_files": 100, "interrupt_grace_s": 0.2},
    **dict.fromkeys(("printed_bytes", "shown_output_bytes"), 1 << 16),
}
SUM = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
CALLS = json.dumps({"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"})
ONE_ARGUMENT_A_LINE = json.dumps([{"input": "[1, 2]\n3", "output": "[3, 6]", "testtype": "functional"}])
ASSERTIONS = json.dumps({"test_list": ["assert add(1, 2) == 3", "assert add(1, 2) < 4"]})
CHECK = json.dumps({"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"})
ADD = "def add(a, b): return a + b"
PASSING = [
    (SUM, "print(sum(map(int, input().split())))"),
    (SUM, "import sys\nfor line in sys.stdin:\n    n = sum(map(int, line.split()))\n"
     "    print(n, 'x', file=sys.stderr)\n    print(n)\nsys.exit()"),
    (SUM, "import os\nprint(float(sum(map(int, os.read(0, 99).split()))))"),
    (SUM, "if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())))"),
    (SUM, "import sys, io, atexit\nout = sys.stdout\nsys.stdout = io.StringIO()\n"
     "atexit.register(lambda: out.write(sys.stdout.getvalue()))\nprint(sum(map(int, input().split())))"),
    (SUM, "import pickle\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
     "print(pickle.loads(pickle.dumps(A(sum(map(int, input().split()))))).x)"),
    (CALLS, ADD),
    (CALLS, "class Solution:\n    def add(self, a: Optional[int], b: int): return reduce(operator.add, (a, b))"),
    (ONE_ARGUMENT_A_LINE, "class Solution:\n    def _x(self): pass\n    def f(self, a: List[int], k): return k, k * 2"),
    (ASSERTIONS, ADD),
    (CHECK, ADD),
]  # fmt: skip
FAILING = [
    (SUM, "print(3)", Outcome.WRONG, "1 of 2 cases; case 2; another result"),
    (CALLS, "def add(a, b): return a - b", Outcome.WRONG, "0 of 2 cases; case 1; another result"),
    (CALLS, "def sub(a, b): return a + b", Outcome.WRONG, "0 of 2 cases; case 1; raised: KeyError: 'add'"),
    (CALLS, f"{ADD}\nraise SystemExit", Outcome.WRONG, "case 1; raised: RuntimeError: it ended before the test did"),
    # Objects that equal everything, and ends that look like a success.
    (ASSERTIONS, "class A:\n    __eq__ = lambda *_: True\ndef add(a, b): return A()", Outcome.WRONG, "another result"),
    (ASSERTIONS, "def add(a, b): raise SystemExit(0)", Outcome.WRONG, "it ended before the test did"),
    (CHECK, "def add(a, b): raise SystemExit(0)", Outcome.WRONG, "it ended before the test did"),
    # What the test knows is in reach of the program, and no word of it means that the test has passed.
    (
        CHECK,
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame := frame.f_back:\n"
        "        for each in frame.f_code.co_consts:\n            if isinstance(each, str) and len(each) == 16:\n"
        "                print(f'\"{each}\"')\n                sys.exit()\n    print('true')\n    sys.exit()",
        Outcome.WRONG,
        "it ended before the test did",
    ),
    (CHECK, "import os\ndef add(a, b): os._exit(0)", Outcome.CRASHED, "killed: the interpreter ended with exit code 0"),
    (CHECK, "def add(a, b): return a", Outcome.WRONG, "raised: AssertionError"),
    ("[]", ADD, Outcome.UNPARSABLE, "the reference: there are no test cases"),
]  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    require_bubblewrap()
    with GraderPool(4, 5.0) as shared:
        yield shared


EXECUTION = ExecutionConfig(grader_workers=1)


def graded(pool: GraderPool, answers: list[tuple[str, str]], partial: bool = False, **changed: object) -> list[Grade]:
    limits = SandboxLimits.model_validate({**PATIENT.model_dump(), **changed})
    kind = CodeGrader(partial=partial, sandbox=SandboxConfig(limits=limits))
    return pool.grade([GradeRequest(f"Like this:\n```python\n{text}\n```", gold, kind=kind) for gold, text in answers])


def test_right_programs_pass_in_every_layout(pool: GraderPool) -> None:
    assert [(grade.outcome, grade.reason) for grade in graded(pool, PASSING)] == [
        (Outcome.CORRECT, f"{count} of {count} cases; right") for count in [2] * 8 + [1, 2, 1]
    ]


def test_wrong_programs_fail_with_the_case_and_the_reason(pool: GraderPool) -> None:
    grades = graded(pool, [(gold, text) for gold, text, *_ in FAILING])
    for grade, (gold, text, outcome, reason) in zip(grades, FAILING, strict=True):
        assert grade.outcome is outcome and reason in grade.reason, (gold, text, grade)


def test_a_share_of_the_cases_may_be_the_reward(pool: GraderPool) -> None:
    gold = json.dumps({"inputs": ["1", "0", "2", "0"], "outputs": ["1", "x", "2", "y"]})
    ends = ["assert n != '2'", "while n == '2': pass"]
    programs = [(gold, f"n = input()\n{end}\nprint(n)") for end in ends]
    raising, endless = graded(pool, programs, True, call_cpu_s=0.5)
    assert (raising.outcome, raising.reward, raising.reason) == (
        Outcome.WRONG, 0.25, "1 of 4 cases; case 2; another result")  # fmt: skip
    assert (endless.outcome, endless.reward) == (Outcome.WRONG, 0.25)
    assert graded(pool, [(gold, "print(input())")])[0].reward == 0.0


def test_cases_do_not_see_each_other_and_a_failure_is_tried_alone(pool: GraderPool) -> None:
    gold = json.dumps({"inputs": ["1", "2"], "outputs": ["1", "2"]})
    programs = [
        "assert 'seen' not in globals()\nseen = 1",
        "import builtins\nbuiltins.seen = 1 // (not hasattr(builtins, 'seen'))",
    ]
    grades = graded(pool, [(gold, f"{program}\nprint(input())") for program in programs])
    assert [grade.reason for grade in grades] == ["2 of 2 cases; right"] * 2


def test_hostile_programs_are_outcomes_and_nothing_of_them_stays(
    pool: GraderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end alike on every machine: only those without an end meet a short limit."""
    for name, value in SMALL.items():
        monkeypatch.setattr(AllOutputShown, name, value)
    gold = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
    before = {process.pid for process in processes_below(os.getpid())}
    short = {"call_cpu_s": 0.3, "call_wall_s": 0.6}
    found: dict[str, Grade] = {}
    for programs, allowed in (
        ([each for each in PROGRAMS if TIME in each.ends], short),
        ([each for each in PROGRAMS if TIME not in each.ends], {}),
    ):
        grades = graded(pool, [(gold, each.text) for each in programs], memory_mib=128, **allowed)
        found |= {each.text: grade for each, grade in zip(programs, grades, strict=True)}
    assert len(found) >= 200
    ends = {text: f"{grade.outcome}: {grade.reason.partition('case 1; ')[2]}" for text, grade in found.items()}
    assert {each.text: ends[each.text] for each in PROGRAMS if not ends[each.text].startswith(each.ends)} == {}
    assert graded(pool, PASSING[:1])[0].outcome is Outcome.CORRECT
    assert {process.pid for process in processes_below(os.getpid())} <= before


def test_a_pool_without_a_working_sandbox_is_refused_at_its_start(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("needs the program bwrap"):
        GraderPool.configured(EXECUTION, GradingConfig(kind=CodeGrader()), tmp_path / "judge")

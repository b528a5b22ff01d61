"""Grading functions of the user's: both signatures, and everything that can go wrong in one."""

import math
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from support.patience import PATIENCE_S, wait_until
from support.refusals import refused

from luffy.config.execution import ExecutionConfig
from luffy.config.grading import CustomGrader, GradingConfig
from luffy.errors import ConfigError, LuffyError
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, Problem
from luffy.types import Outcome

VERL = "data_source, solution_str, ground_truth, extra_info=None"
SCORING = {  # name: parameters, body, settings, response -> reward
    "verl": (
        VERL,
        "return float(solution_str.endswith(ground_truth) and data_source == 'shop' and extra_info['level'] == 2)",
        {}, {"it is yes": 1.0, "it is no": 0.0, "word " * 400_000 + "yes": 1.0}),
    "verl_mapping": (f"{VERL}, **kwargs", "return {'score': 0.75, 'acc': True}", {}, {"x": 0.75}),
    "verifiers": (
        "completion, answer, **kwargs",
        "return 1.0 if completion[-1]['content'] == answer and kwargs['prompt'][0]['role'] == 'user' else 0.0",
        {}, {"yes": 1.0, "no": 0.0}),
    "verifiers_text": (
        "prompt, completion, info", "return completion == 'yes' and prompt == 'Well?' and info['level'] == 2",
        {"completion": "text"}, {"yes": 1.0}),
    "has_defaults": (  # a parser and a state with defaults are left to the function
        "completion, parser=None, state=None, **kwargs",
        "return float(parser is None and state is None and not {'parser', 'state'} & set(kwargs))", {}, {"x": 1.0}),
    "numpys_truth": (
        "solution_str", "import numpy\n    return numpy.isclose(float(solution_str), 1.0)", {}, {"1": 1.0, "2": 0.0}),
    "numpys_number": (
        "solution_str", "import numpy\n    return {'score': numpy.float32(solution_str)}", {}, {"0.5": 0.5}),
    "later": ("completion", "return later(completion)", {}, {"x": 0.5}),
    "later_object": ("completion", "return later_object(completion)", {}, {"x": 1.0}),
}  # fmt: skip
NO_NUMBER = ", which is no finite number"
FAILING = {  # name: body, outcome, reason
    "raises": ("raise ValueError('no such thing')", Outcome.CRASHED, "raised ValueError: no such thing"),
    "returns_text": ("return 'good'", Outcome.CRASHED, f"returned 'good'{NO_NUMBER}"),
    "numpys_text": (
        "import numpy\n    return numpy.str_('good')", Outcome.CRASHED, f"returned np.str_('good'){NO_NUMBER}"),
    "returns_nan": ("return float('nan')", Outcome.CRASHED, f"returned nan{NO_NUMBER}"),
    "hangs": ("time.sleep(7200)", Outcome.TIMED_OUT, "no verdict in 3 s"),
    "exits": ("os._exit(3)", Outcome.CRASHED, "the worker died"),
    "gives_up": ("sys.exit(0)", Outcome.CRASHED, "the worker died"),
    "eats": ("return len(bytearray(8 << 30))", Outcome.CRASHED, "raised MemoryError: "),
}  # fmt: skip
INVALID = {  # name: parameters, reason
    "strange": ("text", "takes (text)"),
    "by_position": ("solution_str, /", "takes `solution_str` by position alone"),
    "parses": ("completion, answer, parser", "needs `parser`"),
    "looks_at_state": ("completion, state, **kwargs", "needs `state`"),
    "needs_more": ("solution_str, weights", "needs `weights`"),
}
MODULE = """
import asyncio, os, subprocess, sys, time

def breeds(solution_str):
    child = subprocess.Popen(["sleep", "7200"])
    with open(solution_str, "w") as file:
        file.write(str(child.pid))
    time.sleep(7200 if "hangs" in solution_str else 0)
    os._exit(3)

async def later(completion):
    await asyncio.sleep(0)
    return 0.5

class Later:
    async def __call__(self, completion):
        return 1.0

later_object = Later()
""" + "".join(f"\ndef {name}({parameters}):\n    {body}\n" for name, parameters, body in [
    *((name, *row[:2]) for name, row in SCORING.items() if "later" not in name),
    *((name, "solution_str", row[0]) for name, row in FAILING.items()),
    *((name, row[0], "return 1.0") for name, row in INVALID.items()),
])  # fmt: skip
EXECUTION = ExecutionConfig(grader_workers=1)
PROBLEM = Problem("Well?", data_source="shop", extra_info={"level": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working directory of these tests, with modules of the user's."""
    path = tmp_path_factory.mktemp("own_graders")
    (path / "shop_graders.py").write_text(MODULE)
    (path / "broken_graders.py").write_text("1 / 0\n")
    (path / "script_graders.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


@pytest.fixture(scope="module")
def pool(folder):
    with GraderPool(1, 3.0) as shared:
        yield shared


def call(pool, name, response, gold="yes", **settings):
    kind = CustomGrader.model_validate({"function": name if ":" in name else f"shop_graders:{name}", **settings})
    return pool.grade([GradeRequest(response, gold, PROBLEM, kind)])[0]


@pytest.mark.parametrize("name", SCORING)
def test_both_signatures_are_called_and_numbers_and_truth_values_also_of_numpy_are_scores(pool, name):
    _, _, settings, responses = SCORING[name]
    for response, reward in responses.items():
        grade = call(pool, name, response, correct_from=0.5, **settings)
        assert (grade.reward, grade.outcome) == (reward, Outcome.CORRECT if reward else Outcome.WRONG)
        assert grade.reason == f"shop_graders:{name} gave {reward:g}"
        # Only the whole score is correct unless a bound says otherwise.
        assert (call(pool, name, response, **settings).outcome is Outcome.CORRECT) == (reward == 1)


@pytest.mark.parametrize("name", FAILING)
def test_a_function_that_fails_is_named_and_the_pool_lives_on(pool, name):
    _, outcome, said = FAILING[name]
    is_own = said.startswith(("raised", "returned"))
    assert call(pool, "verl", f"before {name}, yes").outcome is Outcome.CORRECT
    before = pool.worker_pids()
    grade = call(pool, name, "x")
    assert (grade.outcome, grade.reason) == (outcome, f"shop_graders:{name} {said}" if is_own else said)
    # A function that says nothing gives no reward; one that hangs or dies has been made to by the answer.
    assert math.isnan(grade.reward) if is_own else grade.reward == 0
    if name == "raises":  # and keeps its worker
        assert before and set(before) <= set(pool.worker_pids())
    assert call(pool, "verl", f"after {name}, yes").outcome is Outcome.CORRECT


def assert_it_ends(note):
    pid = int(note.read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.usefixtures("folder")
def test_processes_started_by_a_function_end_with_its_worker_and_with_the_pool(tmp_path, pool):
    for name in ("hangs", "exits"):
        assert call(pool, "breeds", str(tmp_path / name)).outcome in (Outcome.TIMED_OUT, Outcome.CRASHED)
        assert_it_ends(tmp_path / name)
    note = tmp_path / "hangs again"
    with ThreadPoolExecutor(1) as thread:
        with GraderPool(1, PATIENCE_S) as closed:
            hanging = thread.submit(call, closed, "breeds", str(note))
            wait_until(lambda: note.exists() and note.read_text())
        with pytest.raises(LuffyError, match="closed"):
            hanging.result(PATIENCE_S)
    assert_it_ends(note)


@pytest.mark.parametrize(("function", "reason"), [
    ("no_such_module:grade", "cannot be imported"), ("shop_graders:absent", "cannot be imported"),
    ("broken_graders:grade", "ZeroDivisionError"), ("script_graders:grade", "ends Python on import"),
    ("shop_graders:os", "is not a function"), ("builtins:min", "does not tell its parameters"),
    *((f"shop_graders:{name}", reason) for name, (_, reason) in INVALID.items()),
])  # fmt: skip
def test_an_invalid_function_is_the_users_mistake_also_when_the_pool_is_opened(pool, tmp_path, function, reason):
    with refused(function.partition(":")[0], reason, error=ConfigError):
        call(pool, function, "x")
    config = GradingConfig(named={"shop": CustomGrader(function=function)})
    with refused(f"grading: {function.partition(':')[0]}", reason, error=ConfigError):
        GraderPool.configured(EXECUTION, config, tmp_path / "judge")
    with GraderPool.configured(EXECUTION, config, tmp_path / "judge", check_functions=False) as unchecked:
        assert unchecked.grade_one(r"\boxed{1}", "1").outcome is Outcome.CORRECT


def configured(folder, module, text, num_workers=1, timeout_s=PATIENCE_S):
    (folder / f"{module}.py").write_text(text)
    return GraderPool(num_workers, timeout_s, GradingConfig(kind=CustomGrader(function=f"{module}:grade")))


def test_the_same_response_gets_the_same_score(folder):
    lottery = "import random\n\ndef grade(solution_str):\n    return random.random()\n"
    with configured(folder, "lottery", lottery, num_workers=2) as pool:
        scores = {pool.grade_one("x", "y").reward for _ in range(8)}
        assert len(scores) == 1
        assert pool.grade_one("z", "y").reward not in scores


def test_the_modules_of_configured_functions_are_loaded_with_the_worker(folder):
    slow = "import time\ntime.sleep(4)\n\ndef grade(solution_str):\n    return 1\n"
    with configured(folder, "slow_graders", slow, timeout_s=3.0) as pool:
        assert pool.grade_one("x", "y").outcome is Outcome.CORRECT


def test_a_module_whose_import_never_ends_is_named_as_the_likely_cause(folder, monkeypatch):
    monkeypatch.setattr("luffy.grading.workers.STARTUP_TIMEOUT_S", 1.0)
    pool = configured(folder, "endless_graders", "import time\ntime.sleep(7200)\n", timeout_s=5.0)
    with pool, pytest.raises(LuffyError, match="did not start in 1 s; does the import of a custom grader's module end"):
        pool.check_functions()

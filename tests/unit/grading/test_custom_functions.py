"""Grading functions of the user's: both signatures, and everything that can go wrong in one."""

import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.patience import PATIENCE_S, wait_until

from luffy.config.execution import ExecutionConfig
from luffy.config.grading import CustomGrader, GradingConfig
from luffy.errors import ConfigError, LuffyError
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade, GradeRequest, Problem
from luffy.types import Outcome

MODULE = textwrap.dedent(
    """
    import asyncio, os, subprocess, sys, time

    def verl(data_source, solution_str, ground_truth, extra_info=None):
        return float(solution_str.endswith(ground_truth) and data_source == "shop" and extra_info["level"] == 2)

    def verl_mapping(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        return {"score": 0.75, "acc": True}

    def verifiers(completion, answer, **kwargs):
        return 1.0 if completion[-1]["content"] == answer and kwargs["prompt"][0]["role"] == "user" else 0.0

    def verifiers_text(prompt, completion, info):
        return completion == "yes" and prompt == "Well?" and info["level"] == 2

    def numpys_truth(solution_str):
        import numpy
        return numpy.isclose(float(solution_str), 1.0)

    def numpys_number(solution_str):
        import numpy
        return {"score": numpy.float32(solution_str)}

    def numpys_text(solution_str):
        import numpy
        return numpy.str_("good")

    def raises(solution_str, ground_truth):
        raise ValueError("no such thing")

    def returns_text(solution_str):
        return "good"

    def returns_nan(solution_str):
        return float("nan")

    def hangs(solution_str):
        time.sleep(7200)

    def breeds(solution_str):
        child = subprocess.Popen(["sleep", "7200"])
        with open(solution_str, "w") as file:
            file.write(str(child.pid))
        time.sleep(7200 if "hangs" in solution_str else 0)
        os._exit(3)

    def exits(solution_str):
        os._exit(3)

    def gives_up(solution_str):
        sys.exit(0)

    def eats(solution_str):
        return len(bytearray(8 << 30))

    def strange(text):
        return 1.0

    def by_position(solution_str, /):
        return 1.0

    async def later(completion):
        await asyncio.sleep(0)
        return 0.5

    class Later:
        async def __call__(self, completion):
            return 1.0

    later_object = Later()

    def parses(completion, answer, parser):
        return 1.0

    def looks_at_state(completion, state, **kwargs):
        return 1.0

    def needs_more(solution_str, weights):
        return 1.0

    def has_defaults(completion, parser=None, state=None, **kwargs):
        return float(parser is None and state is None and not {"parser", "state"} & set(kwargs))
    """
)
NO_NUMBER = ", which is no finite number"
EXECUTION = ExecutionConfig(grader_workers=1)
PROBLEM = Problem("Well?", data_source="shop", extra_info={"level": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own_graders")
    (path / "shop_graders.py").write_text(MODULE)
    (path / "broken_graders.py").write_text("1 / 0\n")
    (path / "script_graders.py").write_text("import sys\nsys.exit(0)\n")
    return path


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[GraderPool]:
    with pytest.MonkeyPatch.context() as patch, GraderPool(1, 3.0) as shared:
        patch.chdir(folder)
        yield shared


def call(pool: GraderPool, name: str, response: str, gold: str = "yes", **settings: object) -> Grade:
    kind = CustomGrader.model_validate({"function": name if ":" in name else f"shop_graders:{name}", **settings})
    return pool.grade([GradeRequest(response, gold, PROBLEM, kind)])[0]


@pytest.mark.parametrize(
    ("name", "response", "reward"),
    [
        ("verl", "it is yes", 1.0),
        ("later", "x", 0.5),
        ("later_object", "x", 1.0),
        ("verl", "it is no", 0.0),
        ("verl", "word " * 400_000 + "yes", 1.0),
        ("verifiers", "yes", 1.0),
        ("verifiers", "no", 0.0),
        ("numpys_truth", "1", 1.0),
        ("numpys_truth", "2", 0.0),
        ("numpys_number", "0.5", 0.5),
        ("has_defaults", "x", 1.0),  # a parser and a state with defaults are left to the function
    ],
    ids=lambda value: str(value)[:20],
)
def test_both_signatures_are_called_and_numbers_and_truth_values_also_of_numpy_are_scores(pool, name, response, reward):
    grade = call(pool, name, response, correct_from=0.5)
    assert (grade.reward, grade.outcome) == (reward, Outcome.CORRECT if reward else Outcome.WRONG)
    assert grade.reason == f"shop_graders:{name} gave {reward:g}"


def test_a_score_is_the_reward_and_the_bound_makes_it_correct(pool: GraderPool) -> None:
    assert call(pool, "verl_mapping", "x").outcome is Outcome.WRONG
    grade = call(pool, "verl_mapping", "x", correct_from=0.5)
    assert (grade.outcome, grade.reward) == (Outcome.CORRECT, 0.75)
    assert call(pool, "verifiers_text", "yes", completion="text").reward == 1.0


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("raises", Outcome.CRASHED, "shop_graders:raises raised ValueError: no such thing"),
        ("returns_text", Outcome.CRASHED, f"shop_graders:returns_text returned 'good'{NO_NUMBER}"),
        ("numpys_text", Outcome.CRASHED, f"shop_graders:numpys_text returned np.str_('good'){NO_NUMBER}"),
        ("returns_nan", Outcome.CRASHED, f"shop_graders:returns_nan returned nan{NO_NUMBER}"),
        ("hangs", Outcome.TIMED_OUT, "no verdict in 3 s"),
        ("exits", Outcome.CRASHED, "the worker died"),
        ("gives_up", Outcome.CRASHED, "the worker died"),
        ("eats", Outcome.CRASHED, "shop_graders:eats raised MemoryError: "),
    ],
)
def test_a_function_that_fails_is_named_and_the_pool_lives_on(pool, name, outcome, reason):
    grade = call(pool, name, "x")
    assert (grade.outcome, grade.reason, grade.reward) == (outcome, reason, 0.0)
    assert call(pool, "verl", "yes").outcome is Outcome.CORRECT


def assert_it_ends(pid: int) -> None:
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("name", ["hangs", "exits"])
def test_processes_started_by_a_function_end_with_its_worker(pool: GraderPool, tmp_path: Path, name: str) -> None:
    note = tmp_path / name
    assert call(pool, "breeds", str(note)).outcome in (Outcome.TIMED_OUT, Outcome.CRASHED)
    assert_it_ends(int(note.read_text()))


def test_closing_the_pool_ends_processes_started_by_a_function(folder: Path, tmp_path: Path) -> None:
    note = tmp_path / "hangs"
    kind = CustomGrader(function="shop_graders:breeds")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as thread:
        patch.chdir(folder)
        with GraderPool(1, PATIENCE_S) as pool:
            hanging = thread.submit(pool.grade, [GradeRequest(str(note), "", PROBLEM, kind)])
            wait_until(lambda: note.exists() and note.read_text())
        with pytest.raises(LuffyError, match="closed"):
            hanging.result(PATIENCE_S)
    assert_it_ends(int(note.read_text()))


def test_a_function_that_raises_keeps_its_worker(pool: GraderPool) -> None:
    call(pool, "verl", "no, yes")
    before = pool.worker_pids()
    call(pool, "raises", "x")
    assert before
    assert pool.worker_pids() == before


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:grade", "no_such_module:grade cannot be imported"),
        ("shop_graders:absent", "shop_graders:absent cannot be imported"),
        ("broken_graders:grade", "broken_graders fails on import: ZeroDivisionError"),
        ("shop_graders:strange", r"takes \(text\); a grader takes"),
        ("shop_graders:parses", "needs `parser`, which belongs to a rubric of verifiers"),
        ("shop_graders:looks_at_state", "needs `state`, which an environment of verifiers fills"),
        ("shop_graders:needs_more", "needs `weights`, which no grader is given: there are data_source, solution_str"),
        ("shop_graders:os", "is not a function"),
        ("shop_graders:by_position", "takes `solution_str` by position alone"),
        ("builtins:min", "does not tell its parameters"),
        ("script_graders:grade", "script_graders ends Python on import"),
    ],
)
def test_an_invalid_import_path_is_the_users_mistake(pool: GraderPool, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(pool, function, "x")


def test_a_function_that_cannot_work_is_refused_when_the_pool_is_opened(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    config = GradingConfig(named={"shop": CustomGrader(function="shop_graders:parses")})
    with pytest.raises(ConfigError, match=r"^grading: shop_graders:parses needs `parser`.*`completion`, or give"):
        GraderPool.configured(EXECUTION, config, tmp_path / "judge")
    with GraderPool.configured(
        ExecutionConfig(grader_workers=1), config, tmp_path / "judge", check_functions=False
    ) as pool:
        assert pool.grade_one(r"\boxed{1}", "1").outcome is Outcome.CORRECT


def test_the_same_response_gets_the_same_score(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "lottery.py").write_text("import random\n\ndef grade(solution_str):\n    return random.random()\n")
    monkeypatch.chdir(folder)
    with GraderPool(2, PATIENCE_S, GradingConfig(kind=CustomGrader(function="lottery:grade"))) as pool:
        scores = {pool.grade_one("x", "y").reward for _ in range(8)}
        assert len(scores) == 1
        assert pool.grade_one("z", "y").reward not in scores


def test_the_modules_of_configured_functions_are_loaded_with_the_worker(folder, monkeypatch):
    (folder / "slow_graders.py").write_text("import time\ntime.sleep(4)\n\ndef grade(solution_str):\n    return 1\n")
    monkeypatch.chdir(folder)
    with GraderPool(1, 3.0, GradingConfig(kind=CustomGrader(function="slow_graders:grade"))) as pool:
        assert pool.grade_one("x", "y").outcome is Outcome.CORRECT


def test_a_module_whose_import_never_ends_is_named_as_the_likely_cause(folder, monkeypatch):
    (folder / "endless_graders.py").write_text("import time\ntime.sleep(7200)\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("luffy.grading.workers.STARTUP_TIMEOUT_S", 1.0)
    pool = GraderPool(1, 5.0, GradingConfig(kind=CustomGrader(function="endless_graders:grade")))
    with pool, pytest.raises(LuffyError, match="did not start in 1 s; does the import of a custom grader's module end"):
        pool.check_functions()

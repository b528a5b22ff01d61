r"""Programs as answers: each is run on the test cases of its problem, in a sandbox (`luffy/sandbox`).

A reference is JSON text in the layout of a public data set:

    {"inputs": ["1 2\n"], "outputs": ["3\n"]}                     standard input and output (prime_code, APPS, TACO)
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}        calls, also of a method of `Solution`
    [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]    LiveCodeBench; arguments are JSON, one a line
    ["assert add(1, 2) == 3"]                                     also under `test_list` (MBPP) or `assert_case` (verl)
    {"test": "def check(f): ...", "entry_point": "add"}           HumanEval

What a case expects stays outside of the sandbox; only an assertion that is no equality with a constant runs beside the
program, which could tamper with it. Cases share an interpreter as long as they pass, with a namespace and a standard
input for each; one that fails there is run again in a new one.
"""

import ast
import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import re
import threading
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal, DecimalException
from typing import Any, NamedTuple

from luffy.config.grading import CodeGrader
from luffy.config.sandbox import AllOutputShown, SandboxConfig
from luffy.errors import LuffyError
from luffy.grading.request import Grade, Verification
from luffy.http_client import LoopThread
from luffy.json_text import parse_json
from luffy.sandbox import ExecutionResult, ExecutionStatus, PythonSession, SandboxOfLoop
from luffy.sandbox.whole_program import code_of_run, plain
from luffy.types import Outcome

CODE = "code"
"""Name of this check in a `Verification`."""
_FENCE = re.compile(r"^ {0,3}(?P<fence>`{3,}|~{3,}) *(?P<language>[\w+#-]*)[^\n`]*\n", re.MULTILINE)
_LANGUAGES = ("python", "python3", "py")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_CLOSE = Decimal("1e-6")
_OUTCOMES = {ExecutionStatus.RAISED: Outcome.WRONG, ExecutionStatus.TIMED_OUT: Outcome.TIMED_OUT}
"""A program that ends in any other way is `crashed`."""
_MAX_REASON = 120


def last_program(reply: str) -> str | None:
    """The last fenced block of Python in a reply, else the last one without a language; None without either."""
    named, plain, place = None, None, 0
    while (opened := _FENCE.search(reply, place)) is not None:
        fence = opened["fence"]
        closed = re.compile(rf"^ {{0,3}}{re.escape(fence)}+[ \t]*$", re.MULTILINE).search(reply, opened.end())
        if closed is None:
            break
        block, place = reply[opened.end() : closed.start()], closed.end()
        if opened["language"].lower() in _LANGUAGES:
            named = block
        elif not opened["language"]:
            plain = block
    return plain if named is None else named


class Case(NamedTuple):
    """One test of a program."""

    given: str = ""
    """Its standard input."""
    then: str = ""
    """Python that runs after the program, in its namespace, and prints a last line; empty: the output counts."""
    expected: Sequence[object] = ()
    """The output, else the values of that line; one of them has to be met."""


def cases_of(reference: str) -> list[Case]:
    """The test cases of a reference; ValueError where it holds none."""
    try:
        known = parse_json(reference)
        cases = list(_cases(known))
    except (TypeError, LookupError, SyntaxError, RecursionError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not cases:
        raise ValueError("there are no test cases")
    return cases


def _cases(known: Any) -> Iterator[Case]:
    if isinstance(known, Sequence) and not isinstance(known, str):
        known = {"test_list" if all(isinstance(each, str) for each in known) else "test_cases": known}
    if not isinstance(known, Mapping):
        raise TypeError("the reference is neither a list nor a mapping")
    name = known.get("fn_name") or known.get("func_name")
    if "inputs" in known:
        for given, expected in zip(known["inputs"], known["outputs"], strict=True):
            yield _call(name, given, expected) if name else Case(_text(given), expected=[_text(expected)])
    for case in next((known[key] for key in ("test_cases", "tests", "unit_tests") if known.get(key)), ()):
        own, kind = case.get("fn_name") or name, case.get("testtype", case.get("type", ""))
        given, expected = case["input"], case["output"]
        is_call = own is not None or "func" in kind
        yield _call(own, given, expected) if is_call else Case(_text(given), expected=[_text(expected)])
    setup = known.get("test_setup_code") or ""
    for key in ("test_list", "assert_case"):
        for test in known.get(key) or ():
            yield _assertion(test, setup)
    if known.get("test"):
        called = f"\ncheck({known['entry_point']})" if known.get("entry_point") else ""
        yield _assertion(known["test"] + called, setup)


def _text(value: object) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(name: str | None, given: object, expected: object) -> Case:
    if isinstance(given, str):  # LiveCodeBench: an argument a line, all of them JSON
        given, expected = [parse_json(line) for line in given.split("\n") if line.strip()], parse_json(str(expected))
        wanted = [expected]
    else:  # APPS: the value alone, or in a list
        wanted = [expected, *(expected if isinstance(expected, list) and len(expected) == 1 else ())]
    arguments = given if isinstance(given, list) else [given]
    return Case(then=f"_value = _called({name!r})(*json.loads({json.dumps(arguments)!r}))", expected=wanted)


def _assertion(test: str, setup: str) -> Case:
    body = ast.parse(test).body
    compared = body[0].test if len(body) == 1 and isinstance(body[0], ast.Assert) else None
    if isinstance(compared, ast.Compare) and [type(each) for each in compared.ops] == [ast.Eq]:
        with contextlib.suppress(ValueError):  # no constant
            wanted = parse_json(plain(ast.literal_eval(compared.comparators[0])))
            return Case(then=f"{setup}\n_value = {ast.unparse(compared.left)}", expected=[wanted])
    return Case(then=f"{setup}\n{test}\n_value = True", expected=[True])


def same_value(found: Any, expected: Any) -> bool:
    """Whether two JSON values are equal; where one number has a fraction, a millionth of it may differ."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same_value, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_value(found[key], expected[key]) for key in expected)
    if isinstance(found, float | int) and isinstance(expected, float | int) and float in (type(found), type(expected)):
        return _same_word(repr(found), repr(expected))
    return bool(found == expected)


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs agree line by line, blanks at the ends aside: as texts, or word by word as numbers."""
    lines, wanted = ([line.split() for line in text.rstrip().splitlines()] or [[]] for text in (found, expected))
    return [*map(len, lines)] == [*map(len, wanted)] and all(
        map(_same_word, itertools.chain(*lines), itertools.chain(*wanted))
    )


def _same_word(found: str, expected: str) -> bool:
    if found == expected or _NUMBER.fullmatch(found) is None or _NUMBER.fullmatch(expected) is None:
        return found == expected
    try:
        one, other = Decimal(found), Decimal(expected)
        allowed = _CLOSE * max(abs(one), abs(other)) if "." in found + expected else 0
        return one == other or abs(one - other) <= allowed
    except DecimalException:  # beyond all bounds
        return False


class Programs:
    """Runs the programs of a pool, as many at once as it has workers. May be shared by threads."""

    def __init__(self, num_workers: int) -> None:
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._slots = asyncio.Semaphore(num_workers)
        self._sandboxes: dict[SandboxConfig, SandboxOfLoop] = {}
        self._closed = False

    def submit(self, work: Verification) -> "concurrent.futures.Future[Grade]":
        """Grade a program in the background; `close` cancels the future. It holds a UserError without a sandbox."""
        return self._threaded().submit(self._grade(CodeGrader.model_validate_json(work.context), work))

    def check(self, kind: CodeGrader) -> None:
        """UserError where the sandbox of `kind` does not run here."""

        async def opened() -> None:
            await (await self._opened(kind)).close()

        self._threaded().run(opened())

    def close(self) -> None:
        """End all programs; may be called again."""
        with self._lock:
            loop, self._loop, self._closed = self._loop, None, True
        if loop is not None:
            loop.close()

    def _threaded(self) -> LoopThread:
        with self._lock:
            if self._closed:
                raise LuffyError("the grader pool is closed")
            self._loop = self._loop or LoopThread()
            return self._loop

    def _opened(self, kind: CodeGrader) -> Awaitable[PythonSession]:
        limits = AllOutputShown.model_validate(kind.sandbox.limits.model_dump())
        config = kind.sandbox.model_copy(update={"limits": limits})
        return self._sandboxes.setdefault(config, SandboxOfLoop(config)).open_session()

    async def _grade(self, kind: CodeGrader, work: Verification) -> Grade:
        try:
            cases = cases_of(work.gold)
        except ValueError as error:
            return Grade(Outcome.UNPARSABLE, reason=f"the reference: {error}"[:_MAX_REASON])
        async with self._slots:
            return await self._run(kind, work.answer, cases)

    async def _run(self, kind: CodeGrader, program: str, cases: Sequence[Case]) -> Grade:
        started, passed = time.monotonic(), 0
        first: Grade | None = None
        session: PythonSession | None = None
        try:
            for number, case in enumerate(cases, 1):
                code = code_of_run(program, case.given, case.then)
                fault = None if session is None else _fault(case, await session.run(code))
                if session is None or fault is not None:
                    if session is not None:
                        await session.close()
                    session = await self._opened(kind)
                    fault = _fault(case, await session.run(code))
                passed += fault is None
                if fault is not None:
                    first = first or fault.saying(f"case {number}")
                    if not kind.partial or fault.outcome is Outcome.TIMED_OUT:
                        break
                    await session.close()
                    session = None
        finally:
            if session is not None:
                await session.close()
        seconds, own = time.monotonic() - started, passed / len(cases) if kind.partial else None
        grade = first or Grade(Outcome.CORRECT, reason="right")
        return replace(grade, seconds=seconds, own_reward=own).saying(f"{passed} of {len(cases)} cases")


def _fault(case: Case, result: ExecutionResult) -> Grade | None:
    """What is wrong with the result of a case, as a grade; None where it passes."""
    status, output = result.status, result.output
    if status is not ExecutionStatus.OK:
        last = output.rstrip().rpartition("\n")[2].removeprefix("[stopped: ")
        why = last[:_MAX_REASON] if status is ExecutionStatus.RAISED else last.partition(";")[0]
        return Grade(_OUTCOMES.get(status, Outcome.CRASHED), reason=f"{status}: {why}")
    if not case.then:
        agrees = any(same_output(output, str(each)) for each in case.expected)
    else:
        try:
            value = parse_json(output.rstrip("\n").rpartition("\n")[2])
        except ValueError:
            return Grade(Outcome.WRONG, reason="no result")
        agrees = any(same_value(value, each) for each in case.expected)
    return None if agrees else Grade(Outcome.WRONG, reason="another result")

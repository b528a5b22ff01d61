"""Which unit test executes which lines of the rooms that are mutated, and processes that import changed code.

Statements note their execution in a file that all processes of a test share, also those that end by SIGKILL, such as
grading workers. coverage.py would not see these, and takes three times the CPU time of the tests.
"""

import builtins
import json
import marshal
import os
import runpy
import shutil
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mutation_sites import module_with_hits

ROOT = Path.cwd()
WORK = ROOT / ".mutations"
UNUSABLE = WORK / "unusable.json"
"""Tests that fail without a mutant."""
HOOK = Path(__file__).parent / "mutated"
ROOMS = ("objectives", "rl", "training", "grading", "data", "pipeline", "stages")
LIBRARIES = ("hypothesis", "pytest_timeout", "scipy.stats", "math_verify", "jinja2")
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "--tb=line"]
FILES_A_PART = 4
EXAMPLES = 20
"""Of hypothesis, while the map is made."""
Place = tuple[int, int]
"""First line and the line after the last, among the lines of all files."""


def preload() -> None:
    """Import the libraries, and of luffy only the settings, which are not mutated. No thread may be left."""
    from luffy.library_loading import without_collections
    from luffy.pipeline.warm_start import LIBRARIES as OF_STAGES

    with without_collections():
        for library in (*OF_STAGES, *LIBRARIES):
            __import__(library)
        forget_luffy()
        __import__("luffy.config.settings")
    assert not [name for name in sys.modules if name.startswith(tuple(f"luffy.{room}" for room in ROOMS))]


def forget_luffy() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "luffy"]:
        del sys.modules[name]


def forked(folder: Path, work: Callable[[], int], **plan: Any) -> int:
    """Start a process that works in a new `folder`, with the changes of `plan` (mutated/sitecustomize.py)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "plan").write_bytes(marshal.dumps({"modules": {}, "preset": None, "hits": None, **plan}))
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update({"MUTATED": str(folder / "plan"), "PYTHONPATH": str(HOOK)})
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "examples")
        sys.path.insert(0, str(ROOT))  # as `python -m pytest` has it
        if "preset" in plan:
            forget_luffy()
        runpy.run_path(str(HOOK / "sitecustomize.py"))
        code = work()
    finally:
        sys.stdout.flush()
        os._exit(code)


def tested(folder: Path, arguments: Sequence[str], plugin: object) -> int:
    return int(pytest.main([*OPTIONS, f"--basetemp={folder / 'tmp'}", *arguments], plugins=[plugin]))


@cache
def first_lines() -> dict[str, int]:
    """For each file of the rooms the index of its first line among the lines of all; their number under ""."""
    start, found = 0, {}
    for file in sorted(file for room in ROOMS for file in (ROOT / "luffy" / room).rglob("*.py")):
        found[str(file.relative_to(ROOT))] = start
        start += len(file.read_text().splitlines()) + 1
    return {**found, "": start}


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Recorder:
    """Notes the lines and the CPU time of each test, and the test files that read a preset.

    What a fixture for several tests, or the import of their file, executes counts for all tests of the file.
    """

    def __init__(self) -> None:
        self.context = ""
        self.lines: dict[str, bytes] = {}
        self.cost: dict[str, float] = {}
        self.read: dict[str, set[str]] = defaultdict(set)
        from luffy.config import load

        read = load.read_yaml

        def noting(path: Path) -> Any:
            self.read[Path(path).name].add(self.context.partition("::")[0])
            return read(path)

        load.read_yaml = noting

    def flush(self) -> None:
        now = builtins.HITS[:]
        if any(now):
            builtins.HITS[:] = bytes(len(now))
            before = zlib.decompress(self.lines[self.context]) if self.context in self.lines else b"\0"
            both = int.from_bytes(now, "little") | int.from_bytes(before, "little")
            self.lines[self.context] = zlib.compress(both.to_bytes(len(now), "little"), 1)

    def within(self, context: str) -> Iterator[None]:
        self.flush()
        before, self.context = self.context, context
        try:
            return (yield)
        finally:
            self.flush()
            self.context = before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        return (yield from self.within(collector.nodeid.partition("::")[0]))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        is_shared = fixturedef.scope != "function"
        return (yield from self.within(self.context.partition("::")[0])) if is_shared else (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start = sum(os.times()[:4])
        try:
            return (yield from self.within(item.nodeid))
        finally:
            self.cost[item.nodeid] = round(sum(os.times()[:4]) - start, 3)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        from hypothesis import settings

        for function in (getattr(item.obj, "__func__", item.obj) for item in items):
            if given := getattr(function, "_hypothesis_internal_use_settings", None):
                few = settings(given, max_examples=min(given.max_examples, EXAMPLES))
                function._hypothesis_internal_use_settings = few


def make_map(paths: Sequence[str], processes: int) -> None:
    """Run all tests once, some files a process; parts that are there already are kept."""
    files = [file.relative_to(ROOT) for path in paths for file in sorted((ROOT / path).rglob("test_*.py"))]
    files.sort(key=lambda file: next((ROOMS.index(part) for part in file.parts if part in ROOMS), len(ROOMS)))
    first = first_lines()
    code = {
        module_of(file): compile(module_with_hits((ROOT / file).read_text(), start), str(ROOT / file), "exec")
        for file, start in first.items()
        if file
    }
    running: dict[int, Path] = {}

    def wait() -> None:
        pid, status = os.wait()
        print(time.strftime("%H:%M:%S"), running.pop(pid).name, os.waitstatus_to_exitcode(status), flush=True)

    for start in range(0, len(files), FILES_A_PART):
        tests = [str(file) for file in files[start : start + FILES_A_PART]]
        folder = WORK / "map" / tests[0].replace("/", ".")
        if (folder / "part").exists():
            continue
        if len(running) == processes:
            wait()
        hits = WORK / f"{folder.name}.hits"
        hits.parent.mkdir(exist_ok=True)
        hits.write_bytes(bytes(first[""]))

        def measure(folder: Path = folder, tests: Sequence[str] = tests) -> int:
            recorder = Recorder()
            result = tested(folder, tests, recorder)
            read = {name: list(files) for name, files in recorder.read.items()}
            if result <= pytest.ExitCode.TESTS_FAILED:
                (folder / "part").write_bytes(marshal.dumps((recorder.cost, recorder.lines, read)))
            return result

        running[forked(folder, measure, modules=code, hits=str(hits))] = folder
    while running:
        wait()


class Map:
    """What `make_map` has written so far, and the places of mutants that it is asked about."""

    def __init__(self) -> None:
        self.parts: set[Path] = set()
        self.cost: dict[str, float] = {}
        self.unusable = set(json.loads(UNUSABLE.read_text())) if UNUSABLE.exists() else set()
        self._readers: dict[str, set[str]] = defaultdict(set)
        self._near: dict[Place, set[str]] = {}

    def add_new_parts(self, places: Iterable[Place]) -> bool:
        """Read what has been written meanwhile; False when there is nothing new."""
        new = set((WORK / "map").glob("*/part")) - self.parts
        asked = set(places)
        for part in sorted(new):
            cost, lines, read = marshal.loads(part.read_bytes())
            self.cost.update({test: seconds for test, seconds in cost.items() if test not in self.unusable})
            for name, files in read.items():
                self._readers[name].update(files)
            for name, compressed in lines.items():
                hits = zlib.decompress(compressed)
                for place in asked:
                    if hits.find(1, *place) >= 0:
                        self._near.setdefault(place, set()).add(name)
        self.parts |= new
        return bool(new)

    def has_all(self, room: str) -> bool:
        """Whether the map has the room's own unit tests."""
        mapped = {test.partition("::")[0] for test in self.cost}
        files = (ROOT / "tests/unit" / room).rglob("test_*.py")
        return mapped.issuperset(str(file.relative_to(ROOT)) for file in files)

    def readers(self, file: str) -> set[str]:
        """The test files that read a preset."""
        return self._readers[Path(file).name]

    def nearest(self, places: Iterable[Place]) -> set[str]:
        """The tests, or whole files, that execute something in the first of these places where any does."""
        return next((self._near[place] for place in places if place in self._near), set())

    def in_order(self, near: set[str], room: str) -> list[str]:
        """The tests of `near`: those of the room first, and files that take least first."""
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in self.cost:
            file = test.partition("::")[0]
            if test in near or file in near:
                by_file[file].append(test)

        def rank(file: str) -> tuple[bool, float]:
            return f"/{room}/" not in file, sum(self.cost[test] for test in by_file[file])

        return [test for file in sorted(by_file, key=rank) for test in by_file[file]]

"""Which faults would the unit tests not see? Mutants of seven rooms of luffy and of the presets, tried one by one.

Run, in the root of a checkout, with its Python, each step again to continue where it was ended:

    nice -n 10 python tests/campaigns/mutations.py map               # which test executes which line
    nice -n 10 python tests/campaigns/mutations.py run --until 19:15 # the mutants of mutations.csv
    nice -n 10 python tests/campaigns/mutations.py check             # do those tests pass on the code as it is?
    nice -n 10 python tests/campaigns/mutations.py table --column before

Only unit tests count, unless `map` is given more paths. A mutant is tried with the tests that execute its statement, or
where none does its function or else its module, those of its own room first, and cheapest files first, up to `--limit`
CPU seconds; ten times the usual CPU time, or 90 seconds without any, counts as caught. A mutant is named by file,
function, operator and ordinal, with a digest of the function: where that has changed, it is `gone`. Outcomes:
`caught`, `survived`, `unseen` (no test comes near it), and `partly` (survived, but the limit left tests out).

`draw` makes the list: a seeded shuffle for each room, the rooms mixed, so that each prefix is a fair sample. To compare
a later commit, copy the list there, and run `map`, then `run --only caught`, `check`, and `table --column after`. The
source on disk stays as it is: mutated/sitecustomize.py gives processes the mutants, child processes, too. The map is
made without coverage.py, which takes three times the CPU time and does not see grading workers, which end by SIGKILL.
"""

import argparse
import ast
import builtins
import csv
import json
import marshal
import os
import resource
import runpy
import shutil
import signal
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import yaml
from mutated.operators import Site, module_with_hits, sites

ROOT = Path.cwd()
WORK = ROOT / ".mutations"
RESULTS = WORK / "results.jsonl"
LIST = Path(__file__).with_suffix(".csv")
HOOK = Path(__file__).parent / "mutated"
PRESETS = Path("exp_configs/methods")
SAMPLE = {"objectives": 40, "rl": 40, "training": 40, "grading": 30, "data": 30, "pipeline": 30, "stages": 30}
NUM_PRESETS = 22
CHOSEN_PRESETS = {
    ("opd_topk", "objective.terms.0.loss.top_k"): 1000,
    ("opd_topk", "objective.terms.0.loss.rest"): "bucket",
    ("sdpo", "rl.teacher.follows.mixup"): 0.5,
    ("sdft", "rl.teacher.follows.mixup"): 0.1,
    ("sdpg", "rl.teacher.weights"): "start",
    ("rlsd", "rl.teacher.weights"): "start",
    ("psft", "sft.steps_per_phase"): 4,
    ("lte", "objective.group.retry.truncated"): "",
}
"""Faults that one would make by hand; the other presets are drawn."""
ROW = ["room", "file", "function", "operator", "ordinal", "line", "digest", "before", "after", "note"]
LIBRARIES = ("hypothesis", "pytest_timeout", "scipy.stats", "math_verify", "jinja2")
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "--tb=line"]
FILES_A_PART = 4
EXAMPLES = 20
"""Of hypothesis, while the map is made."""
SILENT_S = 90
Row = dict[str, str]


def preload() -> None:
    """Import the libraries, and of luffy only the settings, which are not mutated. No thread may be left."""
    from luffy.library_loading import without_collections
    from luffy.pipeline.warm_start import LIBRARIES as OF_STAGES

    with without_collections():
        for library in (*OF_STAGES, *LIBRARIES):
            __import__(library)
        forget_luffy()
        __import__("luffy.config.settings")
    assert not [name for name in sys.modules if name.startswith(tuple(f"luffy.{room}" for room in SAMPLE))]


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
        variables = {
            "MUTATED": folder / "plan",
            "PYTHONPATH": HOOK,
            "HYPOTHESIS_STORAGE_DIRECTORY": folder / "examples",
        }
        os.environ.update({name: str(value) for name, value in variables.items()})
        if "preset" in plan:
            forget_luffy()
        runpy.run_path(str(HOOK / "sitecustomize.py"))
        code = work()
    finally:
        sys.stdout.flush()
        os._exit(code)


def tested(folder: Path, arguments: Sequence[str], plugin: object) -> int:
    return int(pytest.main([*OPTIONS, f"--basetemp={folder / 'tmp'}", *arguments], plugins=[plugin]))


# The map


@cache
def first_lines() -> dict[str, int]:
    """For each file of the rooms the index of its first line among the lines of all; their number under ""."""
    start, found = 0, {}
    for file in sorted(file for room in SAMPLE for file in (ROOT / "luffy" / room).rglob("*.py")):
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
    rooms = list(SAMPLE)
    files.sort(key=lambda file: next((rooms.index(part) for part in file.parts if part in SAMPLE), len(rooms)))
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
            (folder / "part").write_bytes(marshal.dumps((recorder.cost, recorder.lines, read)))
            return result

        running[forked(folder, measure, modules=code, hits=str(hits))] = folder
    while running:
        wait()


class Map:
    """What `make_map` has written so far."""

    def __init__(self) -> None:
        self.cost: dict[str, float] = {}
        self.lines: dict[str, bytes] = {}
        self.readers: dict[str, set[str]] = defaultdict(set)
        unusable = WORK / "unusable.json"
        failing = set(json.loads(unusable.read_text())) if unusable.exists() else set()
        for part in sorted((WORK / "map").glob("*/part")):
            cost, lines, read = marshal.loads(part.read_bytes())
            self.cost.update({test: seconds for test, seconds in cost.items() if test not in failing})
            self.lines.update(lines)
            for name, files in read.items():
                self.readers[name].update(files)

    def tests(self, row: Row, site: Site | None) -> list[str]:
        """The tests that may see a mutant, in the order in which they are tried."""
        if site is None:
            near = self.readers[f"{row['file'].split('/')[-1]}"]
        else:
            first = first_lines()[row["file"]]
            module = (1, len((ROOT / row["file"]).read_text().splitlines()))
            for start, end in ((site.line, site.line), site.span, module):
                wanted = slice(first + start, first + end + 1)
                if near := {name for name, lines in self.lines.items() if any(zlib.decompress(lines)[wanted])}:
                    break
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in self.cost:
            file = test.partition("::")[0]
            if test in near or file in near:
                by_file[file].append(test)
        return [
            test for file in sorted(by_file, key=lambda file: self._rank(file, by_file, row)) for test in by_file[file]
        ]

    def _rank(self, file: str, by_file: Mapping[str, Sequence[str]], row: Row) -> tuple[bool, float]:
        return f"/{row['room']}/" not in file, sum(self.cost[test] for test in by_file[file])


# The list


def draw(seed: int) -> list[Row]:
    """A new list: as many mutants of each room as `SAMPLE` says, and of the presets."""
    by_room = {"presets": _drawn_presets(Random(f"{seed} presets"))}
    for room, number in SAMPLE.items():
        found = []
        for file in (file for file in first_lines() if file.startswith(f"luffy/{room}/")):
            for site in sites(ast.parse((ROOT / file).read_text())):
                values = (room, file, site.function, site.operator, site.ordinal, site.line, site.digest)
                found.append(dict(zip(ROW, map(str, values), strict=False)))
        by_room[room] = Random(f"{seed} {room}").sample(found, number)
    placed = [((place + 0.5) / len(rows), row) for rows in by_room.values() for place, row in enumerate(rows)]
    return [row for _, row in sorted(placed, key=lambda each: each[0])]


def _drawn_presets(random: Random) -> list[Row]:
    values = {file.stem: dict(_leaves(yaml.safe_load(file.read_text()))) for file in sorted(PRESETS.glob("*.yaml"))}
    seen: dict[str, set[str]] = defaultdict(set)
    for preset in values.values():
        for path, value in preset.items():
            if isinstance(value, str):
                seen[path.rpartition(".")[2]].add(value)
    drawn: dict[tuple[str, str], Any] = {}
    for name, path, value in sorted(
        (name, path, value) for name, preset in values.items() for path, value in preset.items()
    ):
        others = sorted(seen[path.rpartition(".")[2]] - {value}) if isinstance(value, str) else []
        if isinstance(value, bool):
            drawn[name, path] = not value
        elif isinstance(value, int | float):
            drawn[name, path] = value * 2 if value else 1
        elif others and not path.endswith("name"):
            drawn[name, path] = random.choice(others)
    more = random.sample(sorted(set(drawn) - set(CHOSEN_PRESETS)), NUM_PRESETS - len(CHOSEN_PRESETS))
    faults = {**CHOSEN_PRESETS, **{place: drawn[place] for place in more}}
    return [
        dict(
            zip(
                ROW,
                ("presets", str(PRESETS / f"{name}.yaml"), path, f"={value}", "1", "", str(values[name][path])),
                strict=False,
            )
        )
        for (name, path), value in random.sample(list(faults.items()), len(faults))
    ]


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict | list):
        yield prefix.removesuffix("."), values
        return
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield from _leaves(value, f"{prefix}{key}.")


def name_of(row: Row) -> str:
    return " ".join(row[column] for column in ("file", "function", "operator", "ordinal", "digest"))


def mutated(row: Row) -> tuple[Site | None, dict[str, Any]] | None:
    """Where the mutant is, and how processes come to import it; None if the code is no longer what it was."""
    with suppress(OSError):
        text = (ROOT / row["file"]).read_text()
        if row["room"] == "presets":
            values = yaml.safe_load(text)
            *above, last = (int(key) if key.isdecimal() else key for key in row["function"].split("."))
            with suppress(KeyError, IndexError, TypeError):
                below = values
                for key in above:
                    below = below[key]
                if str(below[last]) == row["digest"]:
                    below[last] = yaml.safe_load(row["operator"][1:] or "''")
                    return None, {"preset": (str((ROOT / row["file"]).resolve()), json.dumps(values))}
            return None
        tree = ast.parse(text)
        wanted = tuple(row[column] for column in ("function", "operator", "ordinal", "digest"))
        for site in sites(tree):
            if (site.function, site.operator, str(site.ordinal), site.digest) == wanted:
                site.change()
                return site, {"modules": {module_of(row["file"]): compile(tree, str(ROOT / row["file"]), "exec")}}
    return None


# The run


class Chosen:
    """Runs the chosen tests only, in their order, and writes down the first that fails."""

    def __init__(self, tests: Sequence[str], failed: Path) -> None:
        self.order = {test: place for place, test in enumerate(tests)}
        self.failed = failed

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.failed.open("a") as file:
                file.write(f"{report.nodeid}\n")


def try_tests(tests: Sequence[str], usual_s: float, *arguments: str, **plan: Any) -> tuple[str, list[str]]:
    """How the tests end in a process of their own, and those that failed."""
    folder = WORK / "trial"
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))

    def work() -> int:
        most = int(10 * usual_s + 30)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        return tested(folder, [*arguments, *files], Chosen(tests, folder / "failed"))

    pid = forked(folder, work, **plan)
    process, busy_s, since = psutil.Process(pid), 0.0, time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        now_s = 0.0
        with suppress(psutil.Error):
            now_s = sum(sum(each.cpu_times()[:4]) for each in (process, *process.children(recursive=True)))
        if abs(now_s - busy_s) > 0.1:
            busy_s, since = now_s, time.monotonic()
        if time.monotonic() - since > SILENT_S:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    failed = (folder / "failed").read_text().split("\n")[:-1] if (folder / "failed").exists() else []
    code = os.waitstatus_to_exitcode(status)
    return {0: "passed", 1: "failed", 5: "none"}.get(code, "killed" if code < 0 else "broken"), failed


def run(rows: Sequence[Row], limit_s: float, until: str) -> None:
    """Try the mutants that have no result yet; stop at the time of day `until`."""
    known, done = Map(), {name_of(result) for result in results()}
    for row in rows:
        if name_of(row) in done:
            continue
        if until and time.strftime("%H:%M") >= until:
            return
        started, found, tests, chosen = time.monotonic(), mutated(row), [], []
        outcome, failed = "gone", []
        if found is not None:
            site, plan = found
            tests, usual_s = known.tests(row, site), 0.0
            for test in tests:
                if chosen and usual_s + known.cost[test] > limit_s:
                    break
                chosen.append(test)
                usual_s += known.cost[test]
            ended, failed = try_tests(chosen, usual_s, "-x", **plan) if chosen else ("none", [])
            survived = "survived" if len(chosen) == len(tests) else "partly"
            outcome = {"passed": survived, "none": "unseen"}.get(ended, "caught")
        result = {
            **row, "outcome": outcome, "by": failed[0] if failed else "", "tests": len(chosen), "of": len(tests),
            "seconds": round(time.monotonic() - started, 1),
        }  # fmt: skip
        print(time.strftime("%H:%M:%S"), outcome, name_of(row), result["by"], flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(result) + "\n")


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def check() -> None:
    """Run all tests that have caught something on the unchanged code. What is caught by one that fails is forgotten."""
    found = results()
    tests = sorted({result["by"] for result in found if result["by"]})
    known = Map()
    _, failed = try_tests(tests, sum(known.cost.get(test, 0.0) for test in tests))
    unusable = WORK / "unusable.json"
    before = json.loads(unusable.read_text()) if unusable.exists() else []
    unusable.write_text(json.dumps(sorted({*before, *failed})))
    RESULTS.write_text("".join(json.dumps(result) + "\n" for result in found if result["by"] not in failed))
    print(f"{len(tests)} tests have caught mutants; without any these fail: {failed or 'none'}")


def table(rows: list[Row], column: str, file: Path) -> None:
    """Put the results into the list, and print how many of each room were caught."""
    outcomes = {name_of(result): result["outcome"] for result in results()}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        row[column] = outcomes.get(name_of(row), row.get(column, ""))
        counts[row["room"]][row[column]] += 1
    write(rows, file)
    kinds = ("caught", "survived", "partly", "unseen", "gone")
    print(f"| room | {' | '.join(kinds)} |\n|{'---|' * (len(kinds) + 1)}")
    for room, count in sorted(counts.items()):
        print(f"| {room} | {' | '.join(str(count[kind]) for kind in kinds)} |")


def write(rows: Sequence[Row], file: Path) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, ROW, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["map", "draw", "run", "check", "table"])
    parser.add_argument("paths", nargs="*", default=["tests/unit"], help="of the map")
    parser.add_argument("--processes", type=int, default=2, help="of the map")
    parser.add_argument("--list", type=Path, default=LIST)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, help="CPU seconds of tests for a mutant")
    parser.add_argument("--until", default="", help="time of day, as 19:15")
    parser.add_argument("--only", default="", help="mutants with this outcome before")
    parser.add_argument("--column", choices=["before", "after"], default="before")
    options = parser.parse_args()
    if options.step == "draw":
        write(draw(options.seed), options.list)
        return
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    if options.step == "map":
        preload()
        make_map(options.paths, options.processes)
        return
    with options.list.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if options.step == "table":
        table(rows, options.column, options.list)
        return
    preload()
    if options.step == "check":
        check()
    else:
        run([row for row in rows if not options.only or row["before"] == options.only], options.limit, options.until)


if __name__ == "__main__":
    main()

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
import csv
import json
import os
import resource
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import yaml
from mutation_map import ROOT, UNUSABLE, WORK, Map, Place, first_lines, forked, make_map, module_of, preload, tested
from mutation_sites import sites

RESULTS = WORK / "results.jsonl"
LIST = Path(__file__).with_suffix(".csv")
PRESETS = Path("exp_configs/methods")
SAMPLE = {"objectives": 40, "rl": 40, "training": 40, "grading": 30, "data": 30, "pipeline": 30, "stages": 30}
NUM_PRESETS = 22
CHOSEN_PRESETS = {
    ("opd_topk", "objective.terms.0.loss.top_k"): 1000,
    ("opd_topk", "objective.terms.0.loss.rest"): "bucket",
    ("sdpo", "rl.teachers.self.follows.mixup"): 0.5,
    ("sdft", "rl.teachers.self.follows.mixup"): 0.1,
    ("sdpg", "rl.teachers.self.weights"): "start",
    ("rlsd", "rl.teachers.self.weights"): "start",
    ("psft", "sft.steps_per_phase"): 4,
    ("lte", "objective.group.starts.critique.show.truncated"): "",
}
"""Faults that one would make by hand; the other presets are drawn."""
ROW = ["room", "file", "function", "operator", "ordinal", "line", "digest", "before", "after", "note"]
OWN_TESTS = {"presets": "config"}
SILENT_S = 90
Row = dict[str, str]


def draw(seed: int) -> list[Row]:
    """A new list: as many mutants of each room as `SAMPLE` says, and of the presets."""
    by_room = {"presets": _drawn_presets(Random(f"{seed} presets"))}
    for room, number in SAMPLE.items():
        found = [
            _row(room, file, site.function, site.operator, site.ordinal, site.line, site.digest)
            for file in first_lines()
            if file.startswith(f"luffy/{room}/")
            for site in sites(ast.parse((ROOT / file).read_text()))
        ]
        by_room[room] = Random(f"{seed} {room}").sample(found, number)
    placed = [((place + 0.5) / len(rows), row) for rows in by_room.values() for place, row in enumerate(rows)]
    return [row for _, row in sorted(placed, key=lambda each: each[0])]


def _row(*values: object) -> Row:
    return dict(zip(ROW, map(str, values), strict=False))


def _drawn_presets(random: Random) -> list[Row]:
    values = {
        (file.stem, path): value
        for file in sorted(PRESETS.glob("*.yaml"))
        for path, value in _leaves(yaml.safe_load(file.read_text()))
    }
    seen: dict[str, set[str]] = defaultdict(set)
    for (_, path), value in values.items():
        if isinstance(value, str):
            seen[path.rpartition(".")[2]].add(value)
    drawn: dict[tuple[str, str], Any] = {}
    for (name, path), value in sorted(values.items()):
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
        _row("presets", PRESETS / f"{name}.yaml", path, f"={json.dumps(fault)}", 1, "", values[name, path])
        for (name, path), fault in random.sample(list(faults.items()), len(faults))
    ]


def _leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(values, dict | list):
        yield prefix.removesuffix("."), values
        return
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield from _leaves(value, f"{prefix}{key}.")


def name_of(row: Row) -> str:
    return " ".join(row[column] for column in ("file", "function", "operator", "ordinal", "digest"))


@dataclass(frozen=True)
class Mutant:
    """A row of the list, found in the code."""

    row: Row
    places: tuple[Place, ...]
    """Of its statement, its function and its module; empty for presets."""
    plan: dict[str, Any]
    """How processes come to import it."""

    def tests(self, known: Map) -> list[str]:
        """The tests that may see it, in the order in which they are tried."""
        near = known.nearest(self.places) if self.places else known.readers(self.row["file"])
        return known.in_order(near, self.row["room"])


def find(row: Row) -> Mutant | None:
    """The mutant; None if the code is no longer what it was."""
    file = ROOT / row["file"]
    text = file.read_text() if file.exists() else ""
    if row["room"] == "presets":
        values = yaml.safe_load(text)
        *above, last = (int(key) if key.isdecimal() else key for key in row["function"].split("."))
        with suppress(KeyError, IndexError, TypeError):
            below = values
            for key in above:
                below = below[key]
            if str(below[last]) == row["digest"]:
                below[last] = json.loads(row["operator"][1:])
                return Mutant(row, (), {"preset": (str(file.resolve()), json.dumps(values))})
        return None
    tree, first = ast.parse(text), first_lines().get(row["file"], 0)
    for site in sites(tree):
        named = (site.function, site.operator, str(site.ordinal))
        if named == (row["function"], row["operator"], row["ordinal"]) and site.digest == row["digest"]:
            spans = ((site.line, site.line), site.span, (1, len(text.splitlines())))
            places = tuple((first + start, first + end + 1) for start, end in spans)
            site.change()
            return Mutant(row, places, {"modules": {module_of(row["file"]): compile(tree, str(file), "exec")}})
    return None


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
    """Try the mutants that have no result yet, then survivors for which the map has further tests by now; stop at the
    time of day `until`."""
    known, found = Map(), results()
    mutants = {name_of(row): find(row) for row in rows}
    for name, row in zip(mutants, rows, strict=True):
        if mutants[name] is None:
            found[name] = write_result(row, "gone")
    left = {name: mutant for name, mutant in mutants.items() if mutant is not None}
    while not until or time.strftime("%H:%M") < until:
        if known.add_new_parts(place for mutant in left.values() for place in mutant.places):
            tests = {name: mutant.tests(known) for name, mutant in left.items()}
        tried = {name: found[name]["of"] if name in found else 0 for name in left}
        caught = {name for name in left if name in found and found[name]["outcome"] == "caught"}
        waiting = {
            name for name in left if not known.has_all(OWN_TESTS.get(left[name].row["room"], left[name].row["room"]))
        }
        open_ones = [name for name in left if name not in caught | waiting and len(tests[name]) > tried[name]]
        if not open_ones:
            for name in left.keys() - found.keys() - waiting:
                write_result(left[name].row, "unseen")
            return
        name = min(open_ones, key=lambda name: tried[name] > 0)
        started, chosen, usual_s = time.monotonic(), [], 0.0
        for test in tests[name]:
            if chosen and usual_s + known.cost[test] > limit_s:
                break
            chosen.append(test)
            usual_s += known.cost[test]
        ended, failed = try_tests(chosen, usual_s, "-x", **left[name].plan)
        survived = "survived" if len(chosen) == len(tests[name]) else "partly"
        outcome = {"passed": survived, "none": "unseen"}.get(ended, "caught")
        tried_of, seconds = (len(chosen), len(tests[name])), round(time.monotonic() - started, 1)
        found[name] = write_result(left[name].row, outcome, failed[0] if failed else ended, *tried_of, seconds)


def write_result(
    row: Row, outcome: str, by: str = "", tests: int = 0, of: int = 0, seconds: float = 0.0
) -> dict[str, Any]:
    """Print and append what came of a mutant, of which so many of the tests that come near it were run."""
    result = {**row, "outcome": outcome, "by": by, "tests": tests, "of": of, "seconds": seconds}
    print(time.strftime("%H:%M:%S"), outcome, name_of(row), by, flush=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(result) + "\n")
    return result


def results() -> dict[str, dict[str, Any]]:
    """The last result of each mutant."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {name_of(result): result for result in map(json.loads, lines)}


def check() -> None:
    """Run all tests that have caught something on the unchanged code. What is caught by one that fails is forgotten."""
    found, known = list(results().values()), Map()
    known.add_new_parts(())
    tests = sorted({result["by"] for result in found if "::" in result["by"]})
    _, failed = try_tests(tests, sum(known.cost.get(test, 0.0) for test in tests))
    UNUSABLE.write_text(json.dumps(sorted({*known.unusable, *failed})))
    RESULTS.write_text("".join(json.dumps(result) + "\n" for result in found if result["by"] not in failed))
    print(f"{len(tests)} tests have caught mutants; without any these fail: {failed or 'none'}")


def table(rows: list[Row], column: str, file: Path) -> None:
    """Put the results into the list, and print how many of each room were caught."""
    outcomes = {name: result["outcome"] for name, result in results().items()}
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

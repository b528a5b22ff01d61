"""What holds in the whole repository: its layers, names, prose, pages and skips, and the program of `make test-gpu`."""

import ast
import io
import os
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest
from gpu.quarter_hour import Part, Report, parts, run_all
from support.patience import ran, wait_until

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"

# Packages import only lower layers and no private names of others; names of classes and modules are unique.

GROUND = (
    "config errors types tensor_sharing seeds files confidential processes stop_request http_client "
    "import_paths json_text library_loading markdown_text model_shape sandbox"
)
LAYERS = (
    GROUND, "objectives grading hosted pipeline tracking", "data rollout training statistics", "environments",
    "cluster evaluation", "report rl", "stages", "api", "cli", "__main__ tasks", "flows",
)  # fmt: skip
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages.split()}
PREFECT_SIDE = {"tasks", "flows"}
"""Folders of the checkout that the package holds as links."""
MODULES = sorted(path for path in (ROOT / "luffy").rglob("*.py") if not PREFECT_SIDE & {*path.parts})
FLOW_MODULES = sorted(path for folder in PREFECT_SIDE for path in (ROOT / folder).glob("*.py"))
ALL_MODULES = [*MODULES, *FLOW_MODULES]
STARTERS = {f"luffy/cli/commands/{name}.py" for name in ("compare", "evaluate", "run", "serve")}
"""Modules of the package that may import flows."""
NAMED_BY_RULE = {
    "luffy/cli/commands": "a command's module has the command's name",
    "luffy/stages": "a stage's program has the name of its kind",
    "flows": "a flow has the name of the command or the stage that it serves",
}
MIRRORED_BY_CONFIG = {"environment", "experiment", "objective"}
"""Subjects whose settings, in `luffy/config`, have the name of the module that carries them out."""


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> list[str]:
    """Each imported name in full, `luffy.data.parquet.read_prompts`."""
    names = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def imports() -> list[tuple[Path, str]]:
    return [(path, name) for path in MODULES for name in imported(path)]


def package_of(path: Path) -> str:
    return path.relative_to(ROOT / "luffy").parts[0].removesuffix(".py")


def test_modules_import_only_from_lower_layers() -> None:
    for path, name in imports():
        own, names = package_of(path), name.split(".")
        assert names[0] != "prefect", f"{path} imports {name}"
        if len(names) > 1 and names[1] in PREFECT_SIDE and place(path) in STARTERS:
            continue
        if names[0] == "luffy" and own != "__init__" and len(names) > 1 and names[1] not in (own, "__version__"):
            ground = LAYER_OF[names[1]] == LAYER_OF[own] == 0
            assert LAYER_OF[names[1]] < LAYER_OF[own] or ground, f"{path} imports {name}, not in a lower layer"
    assert {package_of(path) for path in MODULES} - {"__init__"} <= LAYER_OF.keys()


def test_nobody_imports_private_names_and_only_the_console_rich() -> None:
    private = re.compile(r"luffy\.(.*\.)?_(?!_version__$)[^.]*$")
    assert [each for each in imports() if private.match(each[1])] == []
    assert {place(path) for path, name in imports() if name.startswith("rich")} == {"luffy/cli/console.py"}


def test_flows_and_tasks_are_imported_as_parts_of_the_package() -> None:
    """A wheel contains them only there; `flows` and `tasks` would not be importable."""
    found = [(path, name) for path in FLOW_MODULES for name in imported(path)]
    assert [each for each in found if each[1].split(".")[0] in PREFECT_SIDE] == []


def classes() -> Iterator[tuple[str, Path]]:
    for path in ALL_MODULES:
        yield from ((node.name, path) for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef))


def modules() -> Iterator[tuple[str, Path]]:
    for path in ALL_MODULES:
        mirrors = path.stem in MIRRORED_BY_CONFIG and path.is_relative_to(ROOT / "luffy" / "config")
        if not mirrors and path.name != "__init__.py" and place(path.parent) not in NAMED_BY_RULE:
            yield path.stem, path


def files_of_tests() -> Iterator[tuple[str, Path]]:
    """pytest would not collect the second one of a name."""
    return ((path.stem, path) for path in TESTS.rglob("test_*.py"))


@pytest.mark.parametrize("named", [classes, modules, files_of_tests])
def test_no_two_have_one_name(named: Callable[[], Iterable[tuple[str, Path]]]) -> None:
    places = defaultdict(list)
    for name, path in named():
        places[name].append(place(path))
    assert len(places) > 100
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_config_mirrors_modules_that_exist() -> None:
    """A name that is shared no longer leaves the allowance."""
    assert {path.stem for path in ALL_MODULES if "config" not in path.parts[len(ROOT.parts) :]} >= MIRRORED_BY_CONFIG


# Every docstring and comment reads as the field writes, and nothing public goes without one.

HABITS = {
    r"(?:^|(?<=[.:;] )|(?<=\n))Of (?!course\b)": "a sentence that begins with 'Of'",
    r"\bbehind (?:it|them|this|that|which|the (?:first|last|newest|one|step|batch|finished))\b": "'behind' for 'after'",
    r"\bmust in the end\b": "'must in the end' for 'has to'",
    r"\basked of\b": "'asked of' for 'requested from'",
    r"\bhearken|\bheed(?:s|ing|ed)?\b": "'heed' for 'watch' or 'follow'",
}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments, and every string that stands alone: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def test_no_docstring_or_comment_has_the_old_habits() -> None:
    found = [
        f"{place(path)}:{line}: {habit}: {' '.join(text.split())[:80]}"
        for path in ALL_MODULES
        for line, text in prose(path)
        for pattern, habit in HABITS.items()
        if re.search(pattern, " ".join(text.split()))
    ]
    assert not found, "\n".join(found)


def public_without_docstring(path: Path) -> Iterator[str]:
    """A module, and its public functions and classes, that say nothing; functions of one line do so by their name."""
    tree = parsed(path)
    if not ast.get_docstring(tree) and tree.body:
        yield f"{place(path)}: module"
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        one_line = not isinstance(node, ast.ClassDef) and len(node.body) == 1
        if not ast.get_docstring(node) and not one_line:
            yield f"{place(path)}:{node.lineno}: {node.name}"


def test_public_functions_and_classes_have_docstrings() -> None:
    found = [where for path in ALL_MODULES for where in public_without_docstring(path)]
    assert not found, "\n".join(found)


# Files and tests that the documentation names are there.

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("exp_configs/*.md")])
FOLDERS = "data|deploy|docs|exp_configs|flows|luffy|tasks|tests"
NAMED = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]+\.(?:py|yaml|sh|md)\b")
OLD = "CHANGELOG.md"
"""Names files as they were at the time."""
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_file_that_a_page_names_exists_and_they_name_many() -> None:
    named = {page: NAMED.findall(page.read_text()) for page in PAGES}
    gone = {page.name: [name for name in names if not (ROOT / name).exists()] for page, names in named.items()}
    assert {name: files for name, files in gone.items() if files and name != OLD} == {}
    assert sum(map(len, named.values())) > 200


def test_every_promise_names_a_test_and_every_test_that_one_names_exists() -> None:
    table = SECURITY.split("## Promises")[1].split("\n## ")[0]
    promises = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(promises) >= 15 and all("::test_" in promise for promise in promises)
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SECURITY):
        assert name in {node.name for node in parsed(ROOT / file).body if isinstance(node, ast.FunctionDef)}, name


def test_guarantees_have_a_star_where_make_test_leaves_their_file_out() -> None:
    for file, star in re.findall(r"`(tests/[\w/]+\.py)`(\*?)", (ROOT / "docs/guarantees.md").read_text()):
        marks = re.search(r"^pytestmark = (.*)", (ROOT / file).read_text(), re.MULTILINE)
        assert bool(star) == (marks is not None and "slow" in marks[1]), file


# A session of tests ends with what its skipped ones needed.

SKIPPING = """
import pytest

@pytest.mark.parametrize("_", range(3))
@pytest.mark.skipif(True, reason="needs data: make data")
def test_one(_): ...

@pytest.mark.parametrize("text", ["a b", "[c]"])
def test_two(text):
    if text == "[c]":
        pytest.importorskip("no_such_package", reason="needs the package no-such-package")
"""


def test_a_run_ends_with_what_its_skipped_tests_needed(tmp_path: Path) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-p", "support.summary", "-q", "--rootdir", tmp_path]
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(TESTS)}}
    done = ran([*command, "--skipped-to", "skipped.txt", "test_skipping.py"], **where)
    assert "\nskipped: 3 needs data (make data); 1 needs the package no-such-package\n" in done.stdout
    again = ran([*command, "--as-slow", "skipped.txt", "-m", "slow"], **where)
    assert "4 skipped" in again.stdout and "passed" not in again.stdout, again.stdout


def test_every_skip_says_what_it_needs() -> None:
    reasons = {}
    for path in sorted(TESTS.rglob("*.py")):
        for call in (node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            if called.endswith(("pytest.skip", ".skipif", "orskip")):
                said = next((each.value for each in call.keywords if each.arg == "reason"), None)
                said = call.args[0] if called.endswith("pytest.skip") else said
                reasons[f"{path.name}:{call.lineno}"] = "" if said is None else ast.unparse(said).lstrip("f\"'")
    assert len(reasons) > 30
    computed = ("str(error)", "_namespaces")  # what they hold begins so, too, or is torch's own
    assert not {where: said for where, said in reasons.items() if not said.startswith(("needs ", *computed))}


# `make test-gpu`: limits, failures, and what is kept.

STUBBORN = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print("started", flush=True)
time.sleep(600)
"""


def program(text: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", text, *arguments]


def test_a_part_at_its_limit_ends_with_its_children_and_the_next_one_runs_until_the_time_is_used_up(tmp_path) -> None:
    known = {
        "long": Part([program(STUBBORN, str(tmp_path / "pid")), program("print('never')")], 10.0),
        "broken": Part([program("raise SystemExit('no such kernel')"), program("print('second command')")], 60.0),
        "absent": Part([program("print('never')")], 60.0, needs=("no_such_package",)),
        "good": Part([program("print('noise'); print('result 7')")], 60.0, shown="result"),
    }
    assert run_all(known, [*known], {}, 300.0, tmp_path, Report(tmp_path / "out")) == 1
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    results = (tmp_path / "out" / "results.txt").read_text()
    for expected in ("cut at 10 s", "exit code 1", "second command", "no_such_package is not installed", "result 7"):
        assert expected in results
    assert "never" not in results and "noise" not in results
    assert "noise" in (tmp_path / "out" / "log.txt").read_text()
    assert run_all({"late": known["good"]}, ["late"], {}, 1.0, tmp_path, Report(tmp_path)) == 0
    assert "late: skipped: no time left" in (tmp_path / "results.txt").read_text()


@pytest.mark.parametrize("miniature", [True, False])
def test_every_file_that_a_part_names_exists(miniature: bool, tmp_path: Path) -> None:
    for part in parts(tmp_path, miniature).values():
        for word in (word for command in part.commands for word in command):
            if word.endswith((".py", ".yaml")) and not word.startswith("--"):
                assert (ROOT / word).exists(), word

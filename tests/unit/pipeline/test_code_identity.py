"""The code that a stage's key stands for, as declared: by rooms, and checked against what programs import."""

import ast
import functools
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.stages import CONFIGS

from luffy.config import STAGE_KINDS, load_experiment
from luffy.config.stage_kinds import ASKING_ROOMS, PLAYING_ROOMS
from luffy.pipeline import identity
from luffy.pipeline.graph import build_graph
from luffy.pipeline.identity import FRAME, PACKAGE, code_identity

NOT_THE_RESULT = dict.fromkeys(
    # summary.html or card.md, which no stage reads
    ("evaluate", "sweep", "difficulty", "sample"),
    ("report", "config/many_runs", "evaluation", "tracking"),
)
"""Rooms that a program imports and that change none of its numbers."""
VALIDATION = "stages/held_out.py"
"""Counts only where a stage validates."""


def in_a_new_process(rooms, package):
    identity._hash_of.cache_clear()
    identity._known_trees.cache_clear()
    return code_identity(rooms, package)


def rooms_of(stage):
    """Without a validation; `sweep` is in no chain, and has evaluate's settings as far as rooms go."""
    return STAGE_KINDS[stage].rooms_of(settings=None)


@functools.cache
def imported_by(file):
    """Files of the package that `file` names: by imports, anywhere in it, or by a dotted text."""
    names = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.alias):
            names.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.partition(":")[0])
    modules = [name.split(".")[1:] for name in names if name.isascii() and name.startswith("luffy.")]
    places = [PACKAGE.joinpath(*module) for module in modules]
    files = [(place / "__init__.py", place.with_suffix(".py")) for place in places]
    return {next(filter(Path.is_file, pair)) for pair in files if any(map(Path.is_file, pair))}


def reached(entries):
    """What the files `entries` import, and so on, without the frame."""
    waiting, found = [PACKAGE / entry for entry in entries], set()
    while waiting:
        file = waiting.pop()
        place = file.relative_to(PACKAGE).as_posix()
        # A checkpoint's chain, its manifest and the machine's memory decide what runs where, not what comes out.
        is_frame = place in FRAME or place.startswith("pipeline/") or place == "stages/program.py"
        if place not in found and not is_frame:
            found.add(place)
            waiting += imported_by(file)
    return found


def declared(rooms):
    return {file.relative_to(PACKAGE).as_posix() for room in rooms for file in identity._files_of(room, PACKAGE)}


@pytest.mark.parametrize("stage", STAGE_KINDS)
def test_what_a_program_imports_lies_in_its_rooms(stage):
    entries = reached([f"stages/{stage}.py"])
    counted = entries - reached([VALIDATION]) | (entries & declared(rooms_of(stage)))
    allowed = declared((*rooms_of(stage), *NOT_THE_RESULT.get(stage, ())))
    assert sorted(counted - allowed) == []


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_validation_counts_with_all_that_it_imports(stage):
    config = load_experiment(CONFIGS / "smoke.yaml", [f"{stage}.validation={{every: 2, suites: [longer]}}"])
    (validated,) = (node for node in build_graph(config) if node.stage == stage)
    rooms = validated.kind.rooms_of(validated.settings)
    assert sorted(reached([VALIDATION]) - declared(rooms)) == []
    assert set(rooms) > set(rooms_of(stage))


def test_what_answers_depend_on_lies_in_the_rooms_of_their_digest():
    missing = reached(room for room in ASKING_ROOMS if room.endswith(".py")) - declared((*ASKING_ROOMS, *PLAYING_ROOMS))
    records = {"evaluation/__init__.py", "evaluation/sample_files.py"}
    # The settings themselves are in the digest.
    assert {place for place in missing if not place.startswith("config/")} <= records


EVERY = set(STAGE_KINDS)
ASKING = {"difficulty", "sample", "evaluate", "sweep"}
STAGES_OF = {
    **dict.fromkeys(("types.py", "config/experiment.py", "data/schema.py"), EVERY),
    **dict.fromkeys(("environments/registry.py", "grading/kinds.py"), EVERY - {"base", "sft"}),
    **dict.fromkeys(("evaluation/results.py", "statistics/intervals.py"), ASKING | {"report"}),
    "evaluation/across_runs/all_results.py": {"report"},
    "report/page.py": {"report"},
    "rl/loop.py": {"rl"},
    "stages/rl.py": {"rl"},
    "cluster/local.py": {"base", "sft", "rl"},
    "objectives/losses.py": {"base", "sft", "rl", "sweep"},
    "rollout/engine.py": EVERY - {"sft", "report"},
    "stages/answers/store.py": ASKING,
    "stages/evaluate.py": {"evaluate", "sweep"},
    "stages/policy_answers.py": {"difficulty", "sample"},
    "stages/sample.py": {"sample"},
    "tracking/metrics.py": EVERY - {"prepare_data"},
    "training/policy.py": EVERY - {"prepare_data", "evaluate", "report"},
    **dict.fromkeys(("pipeline/reuse.py", "api/runs.py", "cli/main.py", "tasks/stages.py"), frozenset()),
}


def test_a_file_counts_for_the_stages_that_it_can_change_and_for_no_other():
    counted = {stage: declared(rooms_of(stage)) for stage in STAGE_KINDS}
    found = {place: {stage for stage, places in counted.items() if place in places} for place in STAGES_OF}
    assert all((PACKAGE / place).is_file() for place in STAGES_OF)
    assert found == STAGES_OF


def package(root, **files):
    for name, text in {"a/one.py": "import x\nclass A:\n    x: int\n    'Doc.'\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


COUNTS = [
    ("a/one.py", "import   x  # why\n\nclass A:\n    'New.'\n    x: int\n    'Other.'\n", False),
    ("a/one.py", "import x\nclass A:\n    x: str\n", True),
    ("a/b/deep.py", "y = 1", True),
    ("a/page.html.jinja", "<p>", True),
    ("a/notes.md", "why", False),
    ("a/__pycache__/one.pyc", "bytes", False),
    ("c/other.py", "z = 1", False),
]


@pytest.mark.parametrize(("name", "text", "counts"), COUNTS)
def test_code_and_templates_count_and_words_do_not(tmp_path, name, text, counts):
    before = in_a_new_process(["a"], package(tmp_path))
    package(tmp_path, **{name: text})
    assert (in_a_new_process(["a"], tmp_path) != before) is counts


def test_it_is_the_same_in_every_version_of_python_and_a_room_that_is_gone_is_named(tmp_path):
    """Whose syntax trees differ; a workspace may be used with several."""
    package(tmp_path, **{"a/one.py": "class A:\n    def f(self, *, n=None): return f'{n:>{n}}é'"})
    assert in_a_new_process(["a"], tmp_path) == {"a": "ab4da438e10b5dc6"}
    with pytest.raises(FileNotFoundError, match="a/none: no such room of the code"):
        code_identity(["a/none"], tmp_path)


def test_a_run_keeps_the_code_that_it_began_with_and_parses_nothing_twice_unless_its_notes_are_damaged(
    tmp_path, monkeypatch
):
    before = in_a_new_process(["a"], package(tmp_path))
    package(tmp_path, **{"a/one.py": "z = 3"})
    assert code_identity(["a"], tmp_path) == before
    package(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("ast.parse", lambda *args, **options: pytest.fail("parsed"))
        assert in_a_new_process(["a"], tmp_path) == before
    (notes,) = (tmp_path / "__pycache__").glob("trees.*.json")
    for damage in ("", "{", "[]", '{"a": 1}'):
        notes.write_text(damage)
        assert in_a_new_process(["a"], tmp_path) == before, damage
    shutil.rmtree(notes.parent)
    notes.parent.write_text("in the way")
    assert in_a_new_process(["a"], tmp_path) == before


def test_threads_that_need_the_code_at_once_parse_each_module_once_and_never_two(tmp_path, monkeypatch):
    """Two at once end in a SystemError in some versions of Python; a comparison's runs are threads."""
    package, parse, inside, parsed = tmp_path / "luffy", ast.parse, threading.Lock(), []

    def slow(source, *given, **options):
        assert inside.acquire(blocking=False), "two at once"
        time.sleep(0.001)
        parsed.append(source)
        inside.release()
        return parse(source, *given, **options)

    shutil.copytree(PACKAGE / "grading", package / "grading", ignore=shutil.ignore_patterns("__pycache__"))
    in_a_new_process([], package)
    monkeypatch.setattr(ast, "parse", slow)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: code_identity(["grading"], package), range(4)))
    assert found == [found[0]] * 4
    assert sorted(parsed) == sorted({file.read_bytes() for file in package.rglob("*.py")})

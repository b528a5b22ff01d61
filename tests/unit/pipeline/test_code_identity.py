"""The code that a stage's key stands for, as declared: by rooms, and checked against what programs import."""

import ast
import functools
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

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


def in_a_new_process(rooms, package=PACKAGE):
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
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value.partition(":")[0])
    return {found for name in names if (found := file_of(name)) is not None}


@functools.cache
def file_of(module):
    if not module.isascii() or not module.startswith("luffy."):
        return None
    place = PACKAGE.joinpath(*module.split(".")[1:])
    return next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)


def reached(entries):
    """What the files `entries` import, and so on, without the frame."""
    waiting, found = list(entries), set()
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
    entries = reached([PACKAGE / "stages" / f"{stage}.py"])
    counted = entries - reached([PACKAGE / VALIDATION]) | (entries & declared(rooms_of(stage)))
    allowed = declared((*rooms_of(stage), *NOT_THE_RESULT.get(stage, ())))
    assert sorted(counted - allowed) == []


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_validation_counts_with_all_that_it_imports(stage):
    config = load_experiment(CONFIGS / "smoke.yaml", [f"{stage}.validation={{every: 2, suites: [longer]}}"])
    (validated,) = (node for node in build_graph(config) if node.stage == stage)
    rooms = validated.kind.rooms_of(validated.settings)
    assert sorted(reached([PACKAGE / VALIDATION]) - declared(rooms)) == []
    assert set(rooms) > set(rooms_of(stage))


def test_what_answers_depend_on_lies_in_the_rooms_of_their_digest():
    asking = [PACKAGE / room for room in ASKING_ROOMS if room.endswith(".py")]
    missing = reached(asking) - declared((*ASKING_ROOMS, *PLAYING_ROOMS))
    records = {"evaluation/__init__.py", "evaluation/sample_files.py"}
    # The settings themselves are in the digest.
    assert {place for place in missing if not place.startswith("config/")} <= records


EVERY = set(STAGE_KINDS)
ASKING = {"difficulty", "sample", "evaluate", "sweep"}
STAGES_OF = {
    **dict.fromkeys(("*", "config/*", "data"), EVERY),
    **dict.fromkeys(("environments", "grading"), EVERY - {"base", "sft"}),
    **dict.fromkeys(("evaluation/*", "statistics"), ASKING | {"report"}),
    "evaluation/across_runs": {"report"},
    "report": {"report"},
    "rl": {"rl"},
    "stages/rl.py": {"rl"},
    "cluster": {"base", "sft", "rl"},
    "objectives": {"base", "sft", "rl", "sweep"},
    "rollout": EVERY - {"sft", "report"},
    "stages/answers": ASKING,
    "stages/evaluate.py": {"evaluate", "sweep"},
    "stages/policy_answers.py": {"difficulty", "sample"},
    "stages/sample.py": {"sample"},
    "tracking": EVERY - {"prepare_data"},
    "training": EVERY - {"prepare_data", "evaluate", "report"},
    **dict.fromkeys(("pipeline", "api", "cli", "flows", "tasks"), frozenset()),
}


def test_an_edit_moves_the_keys_of_the_stages_that_declare_its_room_and_no_other(tmp_path):
    leaving_out = shutil.ignore_patterns("__pycache__", "flows", "tasks", "shipped")
    copy = shutil.copytree(PACKAGE, tmp_path / "luffy", ignore=leaving_out)
    every = {room for stage in STAGE_KINDS for room in rooms_of(stage)}
    before, moved = in_a_new_process(every, copy), {}
    for room in STAGES_OF:
        place = copy / room
        folder = place.parent if place.name == "*" else place
        files = [place] if place.is_file() else sorted(folder.glob("[a-z]*.py"))
        for file in files[:1]:
            text = file.read_text()
            file.write_text(text + "\n_EDITED = 2\n")
            identity._hash_of.cache_clear()
            changed = {name for name, value in code_identity(every, copy).items() if value != before[name]}
            moved[room] = {stage for stage in STAGE_KINDS if changed & set(rooms_of(stage))}
            file.write_text(text)
    assert moved == {room: STAGES_OF[room] for room in moved}
    assert len(moved) >= len(STAGES_OF) - 2, "flows and tasks are not in the copy"


def package(root, **files):
    for name, text in {"a/one.py": "import x\nclass A:\n    x: int\n    'Doc.'\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("a/one.py", "import   x  # why\n\nclass A:\n    'New.'\n    x: int\n    'Other.'\n", False),
        ("a/one.py", "import x\nclass A:\n    x: str\n", True),
        ("a/b/deep.py", "y = 1", True),
        ("a/page.html.jinja", "<p>", True),
        ("a/notes.md", "why", False),
        ("a/__pycache__/one.pyc", "bytes", False),
        ("c/other.py", "z = 1", False),
    ],
)
def test_code_and_templates_count_and_words_do_not(tmp_path, name, text, counts):
    before = in_a_new_process(["a"], package(tmp_path))
    package(tmp_path, **{name: text})
    assert (in_a_new_process(["a"], tmp_path) != before) is counts


def test_it_is_the_same_in_every_version_of_python(tmp_path):
    """Whose syntax trees differ; a workspace may be used with several."""
    package(tmp_path, **{"a/one.py": "class A:\n    def f(self, *, n=None): return f'{n:>{n}}é'"})
    assert in_a_new_process(["a"], tmp_path) == {"a": "ab4da438e10b5dc6"}


def test_a_run_keeps_the_code_that_it_began_with_and_parses_nothing_twice(tmp_path, monkeypatch):
    before = in_a_new_process(["a"], package(tmp_path))
    package(tmp_path, **{"a/one.py": "z = 3"})
    assert code_identity(["a"], tmp_path) == before
    package(tmp_path)
    monkeypatch.setattr("ast.parse", lambda *args, **options: pytest.fail("parsed"))
    assert in_a_new_process(["a"], tmp_path) == before


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"a": 1}'])
def test_damaged_notes_of_trees_are_made_again(tmp_path, damage):
    before = in_a_new_process(["a"], package(tmp_path))
    (notes,) = (tmp_path / "__pycache__").glob("trees.*.json")
    notes.write_text(damage)
    assert in_a_new_process(["a"], tmp_path) == before
    shutil.rmtree(notes.parent)
    notes.parent.write_text("in the way")
    assert in_a_new_process(["a"], tmp_path) == before


def test_a_room_that_is_gone_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="a/none: no such room of the code"):
        in_a_new_process(["a/none"], package(tmp_path))


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
    identity._hash_of.cache_clear()
    identity._known_trees.cache_clear()
    monkeypatch.setattr(ast, "parse", slow)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: code_identity(["grading"], package), range(4)))
    assert found == [found[0]] * 4
    assert sorted(parsed) == sorted({file.read_bytes() for file in package.rglob("*.py")})

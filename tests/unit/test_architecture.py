"""Packages import only lower layers and no private names of others; names of classes and modules are unique."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = (
    {
        "config",
        "errors",
        "types",
        "broadcast_group",
        "tensor_sharing",
        "seeds",
        "files",
        "confidential",
        "processes",
        "stop_request",
        "http_client",
        "import_paths",
        "json_text",
        "library_loading",
        "markdown_text",
        "model_shape",
        "sandbox",
    },
    {"objectives", "grading", "hosted", "pipeline", "tracking"},
    {"data", "rollout", "training", "statistics"},
    {"environments"},
    {"cluster", "evaluation"},
    {"report", "rl"},
    {"stages"},
    {"api", "costs"},
    {"cli"},
    {"__main__", "tasks"},
    {"flows"},
)
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
PREFECT_SIDE = {"tasks", "flows"}
"""Folders of the checkout that the package holds as links."""
MODULES = sorted(path for path in (ROOT / "luffy").rglob("*.py") if not PREFECT_SIDE & {*path.parts})
FLOW_MODULES = sorted(path for folder in PREFECT_SIDE for path in (ROOT / folder).glob("*.py"))
STARTERS = {
    f"luffy/cli/{path}"
    for path in ("checkup.py", *(f"commands/{name}.py" for name in ("compare", "run", "serve", "study")))
}
"""Modules of the package that may import flows."""
NAMED_BY_RULE = {
    "luffy/cli/commands": "a command's module has the command's name",
    "luffy/stages": "a stage's program has the name of its kind",
    "flows": "a flow has the name of the command or the stage that it serves",
}
MIRRORED_BY_CONFIG = {"environment", "experiment", "objective"}
"""Subjects whose settings, in `luffy/config`, have the name of the module that carries them out."""


@cache
def imported(path):
    """Each imported name in full, `luffy.data.parquet.read_prompts`."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@cache
def imports():
    return [(path, name) for path in MODULES for name in imported(path)]


def package_of(path):
    return path.relative_to(ROOT / "luffy").parts[0].removesuffix(".py")


def test_modules_import_only_from_lower_layers():
    for path, name in imports():
        own, parts = package_of(path), name.split(".")
        assert parts[0] != "prefect", f"{path} imports {name}"
        if len(parts) > 1 and parts[1] in PREFECT_SIDE and path.relative_to(ROOT).as_posix() in STARTERS:
            continue
        if parts[0] == "luffy" and own != "__init__" and len(parts) > 1 and parts[1] not in (own, "__version__"):
            below = LAYER_OF[parts[1]] < LAYER_OF[own]
            ground = LAYER_OF[parts[1]] == LAYER_OF[own] == 0
            assert below or ground, f"{path} imports {name}, which is not in a lower layer"


def test_nobody_imports_private_names():
    private = re.compile(r"luffy\.(.*\.)?_(?!_version__$)[^.]*$")
    assert [each for each in imports() if private.match(each[1])] == []


def test_flows_and_tasks_are_imported_as_parts_of_the_package():
    """A wheel contains them only there; `flows` and `tasks` would not be importable."""
    found = [(path, name) for path in FLOW_MODULES for name in imported(path)]
    assert [each for each in found if each[1].split(".")[0] in PREFECT_SIDE] == []


def test_every_package_has_a_layer():
    packages = {package_of(path) for path in MODULES} - {"__init__"}
    assert packages <= set(LAYER_OF)


def test_only_the_console_knows_rich():
    users = {path.relative_to(ROOT).as_posix() for path, name in imports() if name.startswith("rich")}
    assert users == {"luffy/cli/console.py"}


def shared_names(places):
    return {name: where for name, where in places.items() if len(where) > 1}


def test_no_two_classes_have_one_name():
    places = defaultdict(list)
    for path in (*MODULES, *FLOW_MODULES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    assert shared_names(places) == {}


def test_no_two_modules_have_one_name():
    places = defaultdict(list)
    for path in (path.relative_to(ROOT) for path in (*MODULES, *FLOW_MODULES)):
        mirrors = path.stem in MIRRORED_BY_CONFIG and path.is_relative_to("luffy/config")
        if not mirrors and path.name != "__init__.py" and path.parent.as_posix() not in NAMED_BY_RULE:
            places[path.stem].append(path.as_posix())
    assert shared_names(places) == {}


def test_no_two_files_of_tests_have_one_name():
    """pytest would not collect the second one."""
    places = defaultdict(list)
    for path in (ROOT / "tests").rglob("test_*.py"):
        places[path.stem].append(path.relative_to(ROOT).as_posix())
    assert shared_names(places) == {}


def test_config_mirrors_modules_that_exist():
    """A name that is shared no longer leaves the allowance."""
    elsewhere = {path.stem for path in (*MODULES, *FLOW_MODULES) if "config" not in path.relative_to(ROOT).parts}
    assert elsewhere >= MIRRORED_BY_CONFIG

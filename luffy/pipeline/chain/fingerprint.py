"""The fingerprint of a stage's code: all code that can change its result, and no other.

It covers the modules of the package that `luffy/stages/<stage>.py` reaches by imports (including imports inside
functions and in the `__init__` of packages, and modules named by a string such as `"luffy.grading.worker"`), as syntax
trees without docstrings, comments and layout, and the files packaged next to them (templates, style sheets).

The modules in `_FRAME` are left out, and so are those that only they reach: they affect a result only through settings
and inputs, which the key contains. `engine_pool`, which evaluations use to run on Ray, hands requests to engines whose
own code (`luffy.rollout.vllm_engine`) is covered. The modules in `_BY_SECTION` count only where a stage's settings have
their section: training without validation does not depend on how evaluations are graded.
"""

import ast
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from luffy.config import STAGE_KINDS
from luffy.config.settings import StageSettings
from luffy.pipeline.chain.module_facts import FactsFile, ModuleFacts

_PACKAGE = Path(__file__).resolve().parents[2]
_FRAME = (
    "luffy.pipeline",
    "luffy.stages.program",
    "luffy.cluster.engine_pool",
    "luffy.config.experiment_rules",
    "luffy.config.key_paths",
    "luffy.config.layers",
    "luffy.config.load",
    "luffy.config.stage_kinds",
    "luffy.config.validation_errors",
    "luffy.config.yaml_source",
)


_BY_SECTION = {"validation": "luffy.stages.held_out"}
"""Modules that a stage's program imports for one section of its settings; without the section they do not count."""


def settings_fingerprint(settings: StageSettings) -> dict[str, str]:
    """The modules imported for sections of `settings` that need extra code; empty without such a section."""
    modules = [module for section, module in _BY_SECTION.items() if getattr(settings, section, None) is not None]
    return module_fingerprint(modules) if modules else {}


def code_fingerprint(stage: str, package: Path = _PACKAGE) -> dict[str, str]:
    """Module name (or path of a packaged file) to the hash of its content, for everything that `stage` reaches."""
    program = STAGE_KINDS[stage].program.partition(".")[2]
    return module_fingerprint([f"{package.name}.{program}"], package)


def module_fingerprint(modules: Sequence[str], package: Path = _PACKAGE) -> dict[str, str]:
    """The same for everything that `modules` reach, including themselves."""
    files = _module_files(package)
    waiting, seen, reached = [*modules], set[str](), dict[str, str]()
    facts = _facts_file(package)
    while waiting:
        module = waiting.pop()
        left_out = _is_frame(module) or (module in _BY_SECTION.values() and module not in modules)
        if module not in reached and not left_out:
            found = facts.of(module, files[module], partial(_find_facts, package, module, files[module]))
            reached[module] = found.code
            named = (files.keys() & found.names) - seen
            seen.update(named)
            waiting.extend(named | {parent for name in named for parent in _parents(name) if parent in files})
    facts.save()
    folders = {files[module].parent for module in reached}
    packaged = {file.relative_to(package.parent).as_posix(): _hash(file.read_bytes()) for file in _packaged(folders)}
    return dict(sorted({**reached, **packaged}.items()))


def _module_files(package: Path) -> Mapping[str, Path]:
    """The file of each module of the package; one walk over its folders is faster than a lookup of every name."""
    found = {}
    for folder, _, names in os.walk(package, followlinks=True):
        inside = Path(folder)
        dotted = ".".join((package.name, *inside.relative_to(package).parts))
        for name in names:
            if name.endswith(".py"):
                found[dotted if name == "__init__.py" else f"{dotted}.{name[:-3]}"] = inside / name
    return found


@functools.cache
def _facts_file(package: Path) -> FactsFile:
    return FactsFile(package, made_by=_hash(Path(__file__).read_bytes()))


def _is_frame(module: str) -> bool:
    return any(module == frame or module.startswith(f"{frame}.") for frame in _FRAME)


def _find_facts(package: Path, module: str, file: Path, content: bytes) -> ModuleFacts:
    tree = _WithoutDocstrings().visit(ast.parse(content, filename=module))
    named = set(_named(tree, module if file.name == "__init__.py" else module.rpartition(".")[0]))
    own = sorted(name for name in named if name == package.name or name.startswith(f"{package.name}."))
    return ModuleFacts(_hash(_dump(tree).encode()), tuple(own))


def _dump(value: object) -> str:
    """A syntax tree as text, the same in every version of Python.

    Later versions have more fields, which are empty here, and 3.12 has empty texts in f-strings.
    """
    if isinstance(value, ast.JoinedStr):
        value = ast.JoinedStr([part for part in value.values if getattr(part, "value", None) != ""])
    if isinstance(value, ast.AST):
        given = [f"{name}={_dump(each)}" for name, each in ast.iter_fields(value) if each is not None and each != []]
        return f"{type(value).__name__}({','.join(given)})"
    return f"[{','.join(map(_dump, value))}]" if isinstance(value, list) else ascii(value)


def _named(tree: ast.Module, inside: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, inside)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isascii():
            yield node.value.partition(":")[0]


def _absolute(node: ast.ImportFrom, inside: str) -> str:
    if not node.level:
        return node.module or ""
    parts = inside.split(".")
    kept = parts[: len(parts) - node.level + 1]
    return ".".join([*kept, node.module] if node.module else kept)


def _parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _packaged(folders: set[Path]) -> list[Path]:
    return [
        file
        for folder in folders
        for file in folder.iterdir()
        if file.is_file() and file.suffix not in (".py", ".pyc", ".md") and not file.name.startswith(".")
    ]


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops every bare string: docstrings of modules, classes, functions and attributes."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_string = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_string else node


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]

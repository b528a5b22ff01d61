"""The fingerprint of a stage's code: what can change its result, and nothing else.

It covers the modules of the package that `luffy/stages/<stage>.py` reaches by imports (also those inside functions,
those of the packages' `__init__`, and modules named by a string such as `"luffy.grading.worker"`), as syntax trees
without docstrings, comments and layout, and the files packaged beside them (templates, style sheets).

The frame is left out: what it contributes to a result (settings, inputs) is in the key already.
"""

import ast
import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from luffy.config import StageName

_PACKAGE = Path(__file__).resolve().parents[1]
_FRAME = (
    "luffy.pipeline",
    "luffy.stages.program",
    "luffy.config.load",
    "luffy.config.complaints",
    "luffy.config.yaml_source",
)


def code_fingerprint(stage: StageName, package: Path = _PACKAGE) -> dict[str, str]:
    """Module name (or path of a packaged file) to the hash of its code, for all that `stage` reaches."""
    return module_fingerprint([f"{package.name}.stages.{stage}"], package)


def module_fingerprint(modules: Sequence[str], package: Path = _PACKAGE) -> dict[str, str]:
    """The same for all that `modules` reach, themselves included."""
    waiting, reached = [*modules], set[str]()
    while waiting:
        module = waiting.pop()
        if module not in reached and not _is_frame(module):
            reached.add(module)
            waiting.extend(_imports(package, module))
    hashes = {module: _examined(_file(package, module)).hash for module in reached}
    folders = {_file(package, module).parent for module in reached}
    hashes |= {file.relative_to(package.parent).as_posix(): _hash(file.read_bytes()) for file in _packaged(folders)}
    return dict(sorted(hashes.items()))


def _is_frame(module: str) -> bool:
    return any(module == frame or module.startswith(f"{frame}.") for frame in _FRAME)


def _file(package: Path, module: str) -> Path:
    path = package.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_module(package: Path, name: str) -> bool:
    return (name == package.name or name.startswith(f"{package.name}.")) and _file(package, name).is_file()


def _imports(package: Path, module: str) -> set[str]:
    """Modules of the package that `module` names, and the packages they lie in."""
    file = _file(package, module)
    inside = module if file.name == "__init__.py" else module.rpartition(".")[0]
    examined = _examined(file)
    named = {*examined.names, *(name for node in examined.relative for name in _relative(node, inside))}
    modules = {name for name in named if _is_module(package, name)}
    return modules | {parent for name in modules for parent in _parents(name)}


def _named(tree: ast.Module) -> Iterator[str]:
    """What might be modules, but for relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from _with_members(node.module or "", node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isascii():
            yield node.value.partition(":")[0]


def _relative(node: ast.ImportFrom, inside: str) -> Iterator[str]:
    return _with_members(_absolute(node, inside), node)


def _with_members(base: str, node: ast.ImportFrom) -> Iterator[str]:
    yield base
    yield from (f"{base}.{alias.name}" for alias in node.names)


def _absolute(node: ast.ImportFrom, inside: str) -> str:
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


@dataclass(frozen=True, slots=True)
class _Examined:
    """What a file comes to; a plan asks for it once a stage, and walking its tree takes long."""

    hash: str
    names: frozenset[str]
    relative: tuple[ast.ImportFrom, ...]


def _examined(file: Path) -> _Examined:
    return _examine(file, file.stat().st_mtime_ns)


@functools.cache
def _examine(file: Path, mtime_ns: int) -> _Examined:
    tree = _WithoutDocstrings().visit(ast.parse(file.read_bytes(), filename=str(file)))
    relative = tuple(node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level)
    return _Examined(_hash(ast.dump(tree, annotate_fields=False).encode()), frozenset(_named(tree)), relative)


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops every bare string: docstrings of modules, classes, functions and attributes."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_string = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_string else node


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]

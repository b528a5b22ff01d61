"""The identity of the code that can change a stage's result, as its `StageKind` declares it by rooms.

A room is a folder of the package (`training`), the files directly in one (`evaluation/*`) or one file
(`stages/responses.py`); `*` are the modules at the top. Its hash is over the syntax trees of its modules without
docstrings, comments and layout, and over its packaged files (templates). That the declarations cover what the stages'
programs import is tested, not computed.
"""

import ast
import functools
import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from luffy.files import write_atomic

PACKAGE = Path(__file__).resolve().parents[2]
FRAME = (
    "cluster/engine_pool.py",
    "config/fields.py",
    "config/form.py",
    "config/load.py",
    "config/rules.py",
    "config/stage_kinds.py",
    "config/validation_errors.py",
    "config/yaml_source.py",
)
"""Files that never count: they affect a result only through settings and inputs, which the key contains."""


def code_identity(rooms: Iterable[str], package: Path = PACKAGE) -> dict[str, str]:
    """Each of `rooms` and the hash of its code: 16 hex digits.

    Computed once in a process, so that all stages of a run have the code that it began with. Raises FileNotFoundError
    for a room that the package does not have.
    """
    return {room: _hash_of(room, package) for room in rooms}


@functools.cache
def _hash_of(room: str, package: Path) -> str:
    trees = _Trees.of(package)
    lines = [f"{file.relative_to(package).as_posix()}\0{trees.hash_of(file)}\n" for file in _files_of(room, package)]
    trees.save()
    return _hash("".join(lines).encode())


def _files_of(room: str, package: Path) -> list[Path]:
    place = package / room
    found = [place] if place.is_file() else list(place.parent.iterdir() if place.name == "*" else place.rglob("*"))
    files = sorted(file for file in found if file.is_file() and _counts(file.relative_to(package)))
    if not files:
        raise FileNotFoundError(f"{place}: no such room of the code")
    return files


def _counts(file: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in file.parts)
    return not hidden and file.suffix not in (".pyc", ".md") and file.as_posix() not in FRAME


class _Trees:
    """Hashes of the modules' syntax trees by the hash of their bytes, kept beside the byte code: parsing takes seconds.

    Where they cannot be written, modules are parsed each time.
    """

    def __init__(self, package: Path) -> None:
        self._path = package / "__pycache__" / f"trees.{_hash(Path(__file__).read_bytes())}.json"
        self._known: dict[str, str] = {}
        with suppress(OSError, ValueError, AttributeError):  # none yet, or not ours
            self._known = {str(key): str(value) for key, value in json.loads(self._path.read_bytes()).items()}
        self._is_saved = True

    @classmethod
    @functools.cache
    def of(cls, package: Path) -> "_Trees":
        return cls(package)

    def hash_of(self, file: Path) -> str:
        """The hash of a module's tree, or of another file's bytes."""
        content = file.read_bytes()
        key = _hash(content)
        if file.suffix != ".py":
            return key
        if key not in self._known:
            self._known[key] = _hash(_dump(_WithoutDocstrings().visit(ast.parse(content, filename=str(file)))).encode())
            self._is_saved = False
        return self._known[key]

    def save(self) -> None:
        """Write what is new to disk."""
        if not self._is_saved:
            with suppress(OSError):  # a read-only installation
                self._path.parent.mkdir(exist_ok=True)
                write_atomic(self._path, json.dumps(self._known))
            self._is_saved = True


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


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops every bare string: docstrings of modules, classes, functions and attributes."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_string = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_string else node


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]

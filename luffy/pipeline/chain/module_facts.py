"""Facts about each module that the fingerprint needs, cached beside the byte code: parsing a package takes a second.

An entry is keyed by the hash of the file's content, so it is never stale. If the cache cannot be written, modules are
parsed each time.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from luffy.files import write_atomic

_MOST = 2000
"""Entries above which those not in use are dropped."""


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """Facts about one version of a module's file."""

    code: str
    """Hash of its syntax tree."""
    names: tuple[str, ...]
    """Names in its package that it may import; they need not exist."""


class FactsFile:
    """The facts of one package's modules, in memory and in its `__pycache__`."""

    def __init__(self, package: Path, made_by: str) -> None:
        """`made_by` identifies the code that finds facts; facts found by other code are ignored."""
        self._path = package / "__pycache__" / f"facts.{sys.implementation.cache_tag}.json"
        self._made_by = made_by
        self._kept = self._read()
        self._used: dict[str, ModuleFacts] = {}
        self._by_file: dict[tuple[Path, int, int], ModuleFacts] = {}

    def of(self, module: str, file: Path, find: Callable[[bytes], ModuleFacts]) -> ModuleFacts:
        """The facts of `module`; if unknown, `find` derives them from the content of its file."""
        stat = file.stat()
        version = (file, stat.st_mtime_ns, stat.st_size)
        if version not in self._by_file:
            content = file.read_bytes()
            # The name is part of the key, since relative imports depend on it.
            key = hashlib.sha256(f"{module}\0".encode() + content).hexdigest()
            self._used[key] = self._kept.get(key) or find(content)
            self._by_file[version] = self._used[key]
        return self._by_file[version]

    def save(self) -> None:
        """Write new facts to disk."""
        if self._used.keys() <= self._kept.keys():
            return
        known = {**self._read(), **self._used}
        self._kept = known if len(known) <= _MOST else dict(self._used)
        modules = {key: [facts.code, *facts.names] for key, facts in self._kept.items()}
        with suppress(OSError):  # a read-only installation
            self._path.parent.mkdir(exist_ok=True)
            write_atomic(self._path, json.dumps({"made_by": self._made_by, "modules": modules}))

    def _read(self) -> dict[str, ModuleFacts]:
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            if record["made_by"] != self._made_by:
                return {}
            return {key: ModuleFacts(code, tuple(names)) for key, (code, *names) in record["modules"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none yet, or not ours
            return {}

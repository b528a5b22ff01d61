"""The files that this interpreter needs to run elsewhere: its program, the standard library, and named packages."""

import os
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from luffy.errors import UserError

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
"""Shared libraries, time zones, and where to find libraries outside the usual folders."""


def program() -> Path:
    """The interpreter itself, outside any virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def needed_paths() -> list[Path]:
    """Files and folders to show read-only, parents before what is in them."""
    shown: list[Path] = []
    for path in (*map(Path, _SYSTEM), *_libraries(), program()):
        if path.exists() and not any(path.is_relative_to(parent) for parent in shown):
            shown.append(path)
    return shown


def hidden_paths() -> list[Path]:
    """Folders below `needed_paths` that hold no part of the standard library: packages that others have installed."""
    libraries = {Path("/usr/lib"), *_libraries()}
    found = {folder for library in libraries for folder in library.glob("python3*/*-packages")}
    return sorted(folder for folder in found if not folder.is_symlink())


def _libraries() -> list[Path]:
    prefix = Path(sys.base_prefix).resolve()
    return [prefix / name for name in dict.fromkeys(("lib", sys.platlibdir))]


def package_paths(names: tuple[str, ...]) -> dict[str, Path]:
    """What the named distributions have installed, by its name in `site-packages`; UserError for an unknown one."""
    return {path.name: path for name in names for path in _top_level(name)}


def import_names(name: str) -> list[str]:
    """The packages of an installed distribution, or its modules where it has no package."""
    paths = _top_level(name)
    packages = [path.name for path in paths if (path / "__init__.py").exists()]
    return packages or [path.stem for path in paths if path.suffix == ".py"]


def _top_level(name: str) -> list[Path]:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise UserError(
            f"sandbox.packages: {name} is not installed in this environment; install it or remove it from the list"
        ) from None
    # A script in `bin` is recorded as `../../../bin/...`.
    tops = sorted({file.parts[0] for file in found.files or () if file.parts[0] not in (os.pardir, "__pycache__")})
    return [Path(str(found.locate_file(top))) for top in tops]

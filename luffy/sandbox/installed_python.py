"""The files that this interpreter needs to run elsewhere: its program, the standard library, and named packages."""

import os
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from luffy.errors import UserError

PREFIX = Path("/python")
"""Where the interpreter is in a sandbox: its path is part of tracebacks, and has to be the same on every machine."""

_SYSTEM = ("/lib64", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
"""Shared libraries, time zones, and where to find libraries outside the usual folders."""


def program() -> Path:
    """The interpreter itself, outside any virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def needed_places() -> dict[Path, Path]:
    """Files and folders of this machine to show read-only, and where a sandbox shows them."""
    prefix = Path(sys.base_prefix).resolve()
    system = {path: path for path in (*map(Path, _SYSTEM), *_libraries(Path("/lib")), *_libraries(Path("/usr/lib")))}
    libraries = [prefix / name for name in dict.fromkeys(("lib", sys.platlibdir))]
    if prefix == Path("/usr"):  # its shared libraries are the system's
        libraries = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")]
    own = {path: PREFIX / path.relative_to(prefix) for path in libraries}
    places = system | own | {program(): PREFIX / "bin" / program().name}
    return {path: place for path, place in places.items() if path.exists()}


def hidden_folders() -> list[Path]:
    """Folders in `needed_places` that hold no part of the standard library: packages that others have installed."""
    return sorted(
        place / folder.relative_to(path)
        for path, place in needed_places().items()
        if not path.is_symlink()
        for pattern in ("*-packages", "python3*/*-packages")
        for folder in path.glob(pattern)
        if not folder.is_symlink()
    )


def _libraries(folder: Path) -> list[Path]:
    """Where a system folder holds shared libraries: on Debian in a folder of their own, beside much else."""
    own = folder / str(sysconfig.get_config_var("MULTIARCH"))
    return [folder] if folder.is_symlink() or not own.exists() else [own, *folder.glob("ld-*")]


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

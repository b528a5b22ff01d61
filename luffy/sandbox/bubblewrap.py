"""Sessions under bubblewrap: a process in namespaces of its own, with limits and a filter of system calls.

What a session sees: the standard library and its shared libraries, read-only; an empty `/tmp` in memory; `/dev/null`,
`/dev/zero` and `/dev/urandom`. It has no network, no `/proc`, no capability and no second process.
"""

import asyncio
import json
import os
import shutil
import sys
import sysconfig
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from luffy.config.sandbox import SandboxLimits
from luffy.errors import UserError
from luffy.sandbox import interpreter
from luffy.sandbox.interpreter_process import (
    ENVIRONMENT,
    PYTHON_OPTIONS,
    InterpreterProcess,
    settings_for,
    start_errors,
    wait_readable,
)
from luffy.sandbox.interpreter_session import InterpreterSession
from luffy.sandbox.system_calls import filter_program

_INTERPRETER = Path("/interpreter.py")
_PACKAGES = Path("/packages")
_TMP = "/tmp"  # noqa: S108 - the sandbox's own
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_NOBODY = "65534"


class BubblewrapSandbox:
    """Opens sessions under `bwrap`, 0.7 or newer; UserError where it is not installed or a package is unknown.

    `packages`: installed distributions that the code may import besides the standard library.
    """

    def __init__(self, packages: tuple[str, ...] = ()) -> None:
        found = shutil.which("bwrap")
        if found is None:
            raise UserError(
                "sandbox: kind: bubblewrap needs the program bwrap, which is not installed; "
                "install it, on Debian and Ubuntu by `apt-get install bubblewrap`"
            )
        self._bwrap = found
        shown = {path: _PACKAGES / name for name, path in package_paths(packages).items()}
        self._package_folder = str(_PACKAGES) if shown else None
        self._files = [
            *_shown(needed_places()),
            *(part for folder in hidden_folders() for part in ("--tmpfs", str(folder), "--remount-ro", str(folder))),
            *_shown({Path(interpreter.__file__).resolve(): _INTERPRETER, **shown}),
            *(part for device in _DEVICES for part in ("--dev-bind", device, device)),
        ]
        # More starts at once than there are processors would only make each of them late.
        self._starting = asyncio.Semaphore(os.cpu_count() or 1)

    async def open(self, limits: SandboxLimits) -> InterpreterSession:
        """Start an interpreter; LuffyError with bubblewrap's words when it does not start."""
        async with self._starting:
            with start_errors():
                return InterpreterSession(await self._started(limits), limits)

    async def _started(self, limits: SandboxLimits) -> InterpreterProcess:
        settings = settings_for(limits, self._package_folder)
        with ExitStack() as during_start:
            info_fd, told_fd = os.pipe()
            during_start.callback(os.close, info_fd)
            with os.fdopen(told_fd, "wb"), os.fdopen(os.memfd_create("system calls"), "wb") as refusals:
                refusals.write(filter_program(limits.max_threads))
                refusals.seek(0)  # writes it out, and bubblewrap reads from where it stands
                command = self._command(limits, refusals.fileno(), told_fd)
                inherited = (refusals.fileno(), told_fd)
                process = InterpreterProcess.spawn(command, settings, environment={}, inherited=inherited)
            during_start.enter_context(process.released_on_failure())
            pid = await _told_pid(info_fd)
            if pid is not None:
                with suppress(ProcessLookupError):  # it has failed since, and has said why
                    process.attach(pid)
            await process.wait_until_ready()
            process.count_files(_TMP)
        return process

    def _command(self, limits: SandboxLimits, filter_fd: int, told_fd: int) -> list[str]:
        isolation = ["--unshare-all", "--uid", _NOBODY, "--gid", _NOBODY, "--hostname", "sandbox", "--cap-drop", "ALL"]
        ending = ["--die-with-parent", "--new-session", "--as-pid-1", "--info-fd", str(told_fd)]
        variables = [part for name, value in ENVIRONMENT.items() for part in ("--setenv", name, value)]
        size = str(limits.tmp_mib << 20)
        return [
            self._bwrap,
            *isolation,
            *ending,
            *("--seccomp", str(filter_fd)),
            "--clearenv",
            *variables,
            *("--setenv", "LD_LIBRARY_PATH", str(PREFIX / "lib")),
            *self._files,
            *("--size", size, "--tmpfs", _TMP, "--remount-ro", "/", "--chdir", _TMP),
            *("--", str(PREFIX / "bin" / program().name), *PYTHON_OPTIONS, str(_INTERPRETER)),
        ]


def _shown(places: dict[Path, Path]) -> list[str]:
    """Arguments that show each path read-only at its place; a link stays a link."""
    return [
        part
        for path, place in places.items()
        for part in (
            ("--symlink", str(path.readlink()), str(place))
            if path.is_symlink() and path == place
            else ("--ro-bind", str(path), str(place))
        )
    ]


async def _told_pid(info_fd: int) -> int | None:
    """The process id of the sandbox's first process, from bubblewrap; None when it fails before there is one."""
    told = b""
    while True:
        await wait_readable(os.dup(info_fd))
        if not (chunk := os.read(info_fd, 1 << 12)):
            return int(json.loads(told)["child-pid"]) if told else None
        told += chunk


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

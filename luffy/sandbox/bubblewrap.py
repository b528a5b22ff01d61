"""Sessions under bubblewrap: a process in namespaces of its own, with limits and a filter of system calls.

`open_sandbox` has run a session before it returns, so that what does not work here is refused at the start.

What a session sees: the standard library and its shared libraries, read-only; an empty `/tmp` in memory; `/dev/null`,
`/dev/zero` and `/dev/urandom`. It has no network, no `/proc`, no capability and no second process.
"""

import asyncio
import json
import math
import os
import shutil
import sys
import sysconfig
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from luffy.config.sandbox import SandboxConfig, SandboxLimits
from luffy.errors import LuffyError, UserError
from luffy.sandbox import interpreter
from luffy.sandbox.interpreter_process import (
    ENVIRONMENT,
    PYTHON_OPTIONS,
    InterpreterProcess,
    start_errors,
    wait_readable,
)
from luffy.sandbox.interpreter_session import InterpreterSession
from luffy.sandbox.python_session import ExecutionStatus, PythonSession, Sandbox
from luffy.sandbox.system_calls import filter_program

_INTERPRETER = Path("/interpreter.py")
_PACKAGES = Path("/packages")
_TMP = "/tmp"  # noqa: S108 - the sandbox's own
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_NOBODY = "65534"
_CPU_SLACK_S = 5
"""The kernel's limit of CPU time is a second line of defence: it kills without saying why."""
_REMEDY = (
    "bubblewrap 0.7 or newer has to be able to create user namespaces: `sysctl kernel.unprivileged_userns_clone=1` on "
    "older Debian, `sysctl kernel.apparmor_restrict_unprivileged_userns=0` on Ubuntu, in Docker `--security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined`"
)
_COUNT_THREADS = """
import threading
done, started = threading.Event(), 1
try:
    while started <= {most}:
        threading.Thread(target=done.wait, daemon=True).start()
        started += 1
except RuntimeError:
    pass
done.set()
print(started)
"""


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
        shown = {path: _PACKAGES / path.name for name in packages for path in _top_level(name)}
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
        settings: interpreter.Settings = {
            "memory_bytes": limits.memory_mib << 20,
            "cpu_s": math.ceil(limits.session_cpu_s) + _CPU_SLACK_S,
            "file_bytes": limits.file_mib << 20,
            "max_open_files": limits.max_open_files,
            "max_threads": limits.max_threads,
            "package_folder": self._package_folder,
        }
        with ExitStack() as during_start:
            info_fd, told_fd = os.pipe()
            during_start.callback(os.close, info_fd)
            with os.fdopen(told_fd, "wb"), os.fdopen(os.memfd_create("system calls"), "wb") as refusals:
                refusals.write(filter_program(limits.max_threads))
                refusals.seek(0)  # writes it out, and bubblewrap reads from where it stands
                command = self._command(limits, refusals.fileno(), told_fd)
                inherited = (refusals.fileno(), told_fd)
                process = InterpreterProcess.spawn(command, settings, inherited)
            on_failure = during_start.enter_context(ExitStack())
            on_failure.callback(process.release)
            pid = await _told_pid(info_fd)
            if pid is not None:
                with suppress(ProcessLookupError):  # it has failed since, and has said why
                    process.attach(pid)
            await process.wait_until_ready()
            process.count_files(_TMP)
            on_failure.pop_all()
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


async def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Return the sandbox of `config`; UserError with the remedy where it cannot run, or a limit of it does not hold."""
    sandbox = BubblewrapSandbox(config.packages)
    try:
        session = await sandbox.open(config.limits)
    except UserError:
        raise
    except LuffyError as error:
        raise UserError(f"sandbox: kind: bubblewrap does not work here: {error}; {_REMEDY}") from None
    try:
        result = await session.run("6 * 7")
        if (result.status, result.output) != (ExecutionStatus.OK, "42\n"):
            raise UserError(
                f"sandbox.limits: they do not let even `6 * 7` be computed ({result.status}: "
                f"{_last_line(result.output)}); raise the limit named there"
            )
        for package, name in ((each, name) for each in config.packages for name in import_names(each)):
            result = await session.run(f"import {name}")
            if result.status is not ExecutionStatus.OK:
                raise UserError(
                    f"sandbox.packages: {package} does not import ({_last_line(result.output)}); name the packages "
                    "that it depends on, too, or raise the limit named there"
                )
        most = config.limits.max_threads
        if most > 1:
            result = await session.run(_COUNT_THREADS.format(most=most))
            if result.output != f"{most}\n":
                raise UserError(
                    f"sandbox.limits.max_threads: {most} cannot be enforced here ({_last_line(result.output)} were "
                    "started): the kernel counts the threads of a session from Linux 5.14 on, and never those of the "
                    "superuser; set it to 1, or run as an ordinary user"
                )
    finally:
        await session.close()
    return sandbox


class SandboxOfLoop:
    """Opens the sandbox of a configuration once in each event loop, and sessions of it."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[Sandbox] | None = None

    async def open_session(self) -> PythonSession:
        """Return a new session; LuffyError when the sandbox or the session does not start."""
        loop = asyncio.get_running_loop()
        if self._opening is None or loop is not self._loop:
            self._loop, self._opening = loop, loop.create_task(open_sandbox(self._config))
        sandbox = await asyncio.shield(self._opening)  # an episode that is cancelled does not cancel it for the others
        return await sandbox.open(self._config.limits)


def _last_line(output: str) -> str:
    return output.rstrip().rpartition("\n")[2]


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

"""Sessions under bubblewrap: a process in namespaces of its own, with limits and a filter of system calls.

What a session sees: the standard library and its shared libraries, read-only; an empty `/tmp` in memory; `/dev/null`,
`/dev/zero` and `/dev/urandom`. It has no network, no `/proc`, no capability and no second process.
"""

import asyncio
import json
import os
import shutil
from contextlib import ExitStack, suppress
from pathlib import Path

from luffy.config.environment import SandboxLimits
from luffy.errors import UserError
from luffy.sandbox import interpreter
from luffy.sandbox.installed_python import PREFIX, hidden_folders, needed_places, package_paths, program
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

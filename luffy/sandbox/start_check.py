"""Opens the sandbox that a configuration names, after a session of it has run; sessions without a sandbox."""

import asyncio
import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from luffy.config.sandbox import SandboxConfig, SandboxLimits
from luffy.errors import LuffyError, UserError
from luffy.sandbox import interpreter
from luffy.sandbox.bubblewrap import BubblewrapSandbox, import_names, package_paths, program
from luffy.sandbox.interpreter_process import (
    ENVIRONMENT,
    PYTHON_OPTIONS,
    InterpreterProcess,
    settings_for,
    start_errors,
)
from luffy.sandbox.interpreter_session import InterpreterSession
from luffy.sandbox.python_session import ExecutionStatus, PythonSession, Sandbox

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


async def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Return the sandbox of `config`; UserError with the remedy where it cannot run, or a limit of it does not hold."""
    sandbox: Sandbox = (
        BubblewrapSandbox(config.packages) if config.kind == "bubblewrap" else UnsafeLocalSandbox(config.packages)
    )
    try:
        session = await sandbox.open(config.limits)
    except UserError:
        raise
    except LuffyError as error:
        remedy = f"; {_REMEDY}" if config.kind == "bubblewrap" else ""
        raise UserError(f"sandbox: kind: {config.kind} does not work here: {error}{remedy}") from None
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
        if config.kind == "bubblewrap" and most > 1:
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


logger = logging.getLogger(__name__)


class UnsafeLocalSandbox:
    """Opens sessions that may do whatever this user may: read and write files, use the network, start processes.

    Time, memory, output and the size of a file are limited; files, threads and disk space are not. A session starts
    in a temporary folder, which is deleted with it, though not after a `kill -9` of this process. A process that its
    code has put into a session of its own outlives it. UserError where a package is unknown.
    """

    def __init__(self, packages: tuple[str, ...] = ()) -> None:
        self._packages = package_paths(packages)
        logger.warning("sandbox: kind: unsafe_local runs the model's code with all rights of this user")

    async def open(self, limits: SandboxLimits) -> InterpreterSession:
        """Start an interpreter; LuffyError when it does not start."""
        with start_errors(), ExitStack() as on_failure:
            folder = Path(tempfile.mkdtemp(prefix="luffy-unsafe-"))
            on_failure.callback(shutil.rmtree, folder, ignore_errors=True)
            packages, work = folder / "packages", folder / "work"
            packages.mkdir()
            work.mkdir()
            for name, path in self._packages.items():
                (packages / name).symlink_to(path)
            process = InterpreterProcess.spawn(
                [str(program()), *PYTHON_OPTIONS, str(Path(interpreter.__file__).resolve())],
                settings_for(limits, str(packages), die_with=os.getpid()),
                environment={**ENVIRONMENT, "HOME": str(work)},
                folder=work,
            )
            process.when_released(on_failure.pop_all().close)
            with process.released_on_failure():
                process.attach(process.pid)
                await process.wait_until_ready()
            return InterpreterSession(process, limits)

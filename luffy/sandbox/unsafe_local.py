"""Sessions without a sandbox: an ordinary child process with limits of resources, for code that you trust."""

import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from luffy.config.environment import SandboxLimits
from luffy.sandbox import interpreter
from luffy.sandbox.installed_python import package_paths, program
from luffy.sandbox.interpreter_process import (
    ENVIRONMENT,
    PYTHON_OPTIONS,
    InterpreterProcess,
    settings_for,
    start_errors,
)
from luffy.sandbox.interpreter_session import InterpreterSession

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
        with start_errors():
            process = self._spawned(limits, Path(tempfile.mkdtemp(prefix="luffy-unsafe-")))
            with process.released_on_failure():
                process.attach(process.pid)
                await process.wait_until_ready()
            return InterpreterSession(process, limits)

    def _spawned(self, limits: SandboxLimits, folder: Path) -> InterpreterProcess:
        with ExitStack() as on_failure:
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
            return process

"""Runs code in real sandboxes, for tests that are not asynchronous."""

import asyncio
import functools
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psutil
import pytest

from luffy.config.sandbox import SandboxConfig, SandboxLimits
from luffy.sandbox import ExecutionResult, PythonSession, Sandbox, open_sandbox
from support.patience import PATIENCE_S, lives

T = TypeVar("T")


class _Patient(SandboxLimits):
    session_cpu_s = 200.0
    session_wall_s = 4 * PATIENCE_S
    interrupt_grace_s = PATIENCE_S
    tmp_mib = 8
    file_mib = 4
    max_files = 500


PATIENT = _Patient(call_cpu_s=60.0, call_wall_s=PATIENCE_S, memory_mib=256)
"""Limits that code reaches which has no end, and no other code on a slow machine."""


def require_bubblewrap() -> None:
    """Skip the test where bubblewrap is missing, or the kernel refuses it."""
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap: apt-get install bubblewrap")
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"needs user namespaces: {tried.stderr.strip()}")


def limits(**changed: object) -> SandboxLimits:
    """`PATIENT`, but for what the test is about."""
    given = {name: value for name, value in changed.items() if name in SandboxLimits.model_fields}
    fixed = {name: value for name, value in changed.items() if name not in given}
    return type("_Changed", (_Patient,), fixed).model_validate({**PATIENT.model_dump(), **given})


@functools.cache
def _sandbox() -> Sandbox:
    """The sandbox of most tests, whose start runs a session to see whether it works: once is enough."""
    return asyncio.run(open_sandbox(SandboxConfig(limits=PATIENT)))


def in_session(
    use: Callable[[PythonSession], Awaitable[T]], within: SandboxLimits = PATIENT, config: SandboxConfig | None = None
) -> T:
    """What `use` returns for a session, which is closed afterwards."""
    usual = _sandbox() if config is None else None

    async def run() -> T:
        sandbox = await open_sandbox(config) if usual is None else usual
        session = await sandbox.open(within)
        try:
            return await use(session)
        finally:
            await session.close()

    return asyncio.run(run())


def run_calls(
    *codes: str, within: SandboxLimits = PATIENT, config: SandboxConfig | None = None
) -> list[ExecutionResult]:
    """The results of calls of one session."""

    async def use(session: PythonSession) -> list[ExecutionResult]:
        return [await session.run(code) for code in codes]

    return in_session(use, within, config)


def run_code(code: str, within: SandboxLimits = PATIENT) -> ExecutionResult:
    """The result of one call in a session of its own."""
    return run_calls(code, within=within)[0]


def processes_below(pid: int) -> list[psutil.Process]:
    """Everything that a process has started and that lives."""
    return [child for child in psutil.Process(pid).children(recursive=True) if lives(child)]

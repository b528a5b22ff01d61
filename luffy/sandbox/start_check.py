"""Opens the sandbox that a configuration names, after a session of it has run."""

from luffy.config.environment import SandboxConfig
from luffy.errors import LuffyError, UserError
from luffy.sandbox.bubblewrap import BubblewrapSandbox
from luffy.sandbox.installed_python import import_names
from luffy.sandbox.python_session import ExecutionStatus, PythonSession, Sandbox
from luffy.sandbox.unsafe_local import UnsafeLocalSandbox

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
        await _check(session, config)
    finally:
        await session.close()
    return sandbox


async def _check(session: PythonSession, config: SandboxConfig) -> None:
    first = await session.run("6 * 7")
    if (first.status, first.output) != (ExecutionStatus.OK, "42\n"):
        raise UserError(
            f"sandbox.limits: they do not let even `6 * 7` be computed ({first.status}: {_last_line(first.output)}); "
            "raise the limit named there"
        )
    for name in config.packages:
        await _check_import(session, name)
    if config.kind == "bubblewrap" and config.limits.max_threads > 1:
        await _check_threads(session, config.limits.max_threads)


async def _check_import(session: PythonSession, package: str) -> None:
    for name in import_names(package):
        result = await session.run(f"import {name}")
        if result.status is not ExecutionStatus.OK:
            raise UserError(
                f"sandbox.packages: {package} does not import ({_last_line(result.output)}); name the packages that it "
                "depends on, too, or raise the limit named there"
            )


async def _check_threads(session: PythonSession, most: int) -> None:
    result = await session.run(_COUNT_THREADS.format(most=most))
    if result.output != f"{most}\n":
        raise UserError(
            f"sandbox.limits.max_threads: {most} cannot be enforced here ({_last_line(result.output)} were started): "
            "the kernel counts the threads of a session from Linux 5.14 on, and never those of the superuser; "
            "set it to 1, or run as an ordinary user"
        )


def _last_line(output: str) -> str:
    return output.rstrip().rpartition("\n")[2]

"""The interface of sandboxes: persistent Python interpreters for code that nobody has read.

    sandbox = await open_sandbox(config)
    session = await sandbox.open(config.limits)
    result = await session.run("x = 6 * 7\\nx")      # result.output == "42\\n", result.status is ExecutionStatus.OK
    await session.close()

Another implementation (a container runtime, a machine elsewhere) has to promise the following.

- *Isolation.* Code cannot read or write a file, a variable or a process of the host or of another session, and it
  reaches no network.
- *Bounds.* Each limit of `SandboxLimits` is enforced from outside the interpreter or by the kernel. What a session
  prints, writes or allocates cannot exhaust the host or the caller.
- *No exception by code.* Whatever the code does, `run` returns a result. It raises only when it is cancelled; the
  session is then over.
- *Nothing is left.* After `close`, after the session is garbage, and after the caller's death by `kill -9`, no
  process and no file of the session remains.
- *Order.* Calls of one session run one after the other; sessions are independent of each other.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from luffy.config.sandbox import SandboxLimits


class ExecutionStatus(StrEnum):
    """How a call ended."""

    OK = "ok"
    RAISED = "raised"
    """The code raised an exception, or is no Python; the traceback is in the output."""
    TIMED_OUT = "timed_out"
    """A limit of CPU or wall-clock time was reached."""
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"
    """The code printed more than `printed_bytes`."""
    FILE_LIMIT = "file_limit"
    """The session had more than `max_files` files."""
    KILLED = "killed"
    """The interpreter died: a crash, `os._exit`, the kernel's shortage of memory."""
    CORRUPTED = "corrupted"
    """The code wrote to the control socket, and the session was killed."""
    ENDED = "ended"
    """The session had ended before; this code was not run."""


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """What one call did."""

    output: str
    """Standard output and error in their order, then the `repr` of the last expression, as a notebook cell shows them.
    What was left out of it, and what stopped the call, stands in square brackets."""
    status: ExecutionStatus
    session_is_over: bool
    """Whether the interpreter has ended, and its names with it."""
    wall_s: float


class PythonSession(Protocol):
    """A persistent interpreter: names defined in one call are there in the next."""

    async def run(self, code: str) -> ExecutionResult:
        """Run `code`. After the session's end, the result says so."""

    async def close(self) -> None:
        """End the interpreter and return once it is gone; may be called again."""


class Sandbox(Protocol):
    """Opens sessions; used from one event loop, whose thread outlives them: the kernel may end them with it."""

    async def open(self, limits: SandboxLimits) -> PythonSession:
        """Start an interpreter; LuffyError when it does not start."""

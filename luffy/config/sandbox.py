"""How code written by a model is confined: by the tool `python`, and by the grader `code`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from luffy.config.strict import StrictModel

_PackageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class SandboxLimits(StrictModel):
    """What one session may use. A call that reaches a limit ends with a status, never with an error of the run."""

    call_cpu_s: PositiveFloat = 10.0
    """CPU time of one call. The limit to tune: unlike wall-clock time, it hardly depends on the machine's load."""
    call_wall_s: PositiveFloat = 60.0
    """Wall-clock time of one call, for code that waits."""
    interrupt_grace_s: PositiveFloat = 1.0
    """Time that a call past its limit gets to end by KeyboardInterrupt before the session is killed."""
    session_cpu_s: PositiveFloat = 120.0
    """CPU time of all calls of a session."""
    session_wall_s: PositiveFloat = 3600.0
    """Time from a session's start, after which it is killed even while it is idle."""
    memory_mib: Annotated[int, Field(ge=64)] = 512
    """Address space of the interpreter in MiB; past it Python raises MemoryError, and the session survives."""
    tmp_mib: PositiveInt = 64
    """Size of the session's `/tmp`, the one place where it can write. It is held in memory beside `memory_mib`."""
    file_mib: PositiveInt = 64
    """Size of one file."""
    max_files: PositiveInt = 2000
    """Files and folders in `/tmp`; a session with more is killed."""
    max_open_files: Annotated[int, Field(ge=16)] = 64
    """Open file descriptors."""
    max_threads: PositiveInt = 1
    """Threads of the interpreter; more than 1 is refused for the superuser. Processes cannot be started at all."""
    shown_output_bytes: Annotated[int, Field(ge=64)] = 8192
    """Output of one call that is kept, in UTF-8; what is left out between its start and its end is counted there."""
    printed_bytes: PositiveInt = 1 << 20
    """Output of one call after which it is stopped."""

    def _complaints(self) -> Iterator[str]:
        for inner, outer in (
            ("call_cpu_s", "session_cpu_s"),
            ("call_wall_s", "session_wall_s"),
            ("shown_output_bytes", "printed_bytes"),
        ):
            if getattr(self, inner) > getattr(self, outer):
                yield f"{inner} is larger than {outer}: lower {inner} or raise {outer}"


class SandboxConfig(StrictModel):
    """How code written by a model is confined."""

    kind: Literal["bubblewrap"] = "bubblewrap"
    """A process in separate namespaces, without this machine's network, files or environment."""
    packages: tuple[_PackageName, ...] = ()
    """Distributions that the code may import, each with its dependencies (`sympy` needs `mpmath`)."""
    limits: SandboxLimits = SandboxLimits()

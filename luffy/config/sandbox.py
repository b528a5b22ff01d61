"""How code written by a model is confined: by the tool `python`, and by the grader `code`."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from luffy.config.strict import StrictModel

_PackageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


_SESSION_CPU_S, _SESSION_WALL_S = 120.0, 3600.0


class SandboxLimits(StrictModel):
    """What one session may use. A call that reaches a limit ends with a status, never with an error of the run."""

    call_cpu_s: Annotated[float, Field(gt=0.0, le=_SESSION_CPU_S)] = 10.0
    """CPU time of one call. The limit to tune: unlike wall-clock time, it hardly depends on the machine's load."""
    call_wall_s: Annotated[float, Field(gt=0.0, le=_SESSION_WALL_S)] = 60.0
    """Wall-clock time of one call, for code that waits."""
    memory_mib: Annotated[int, Field(ge=64)] = 512
    """Address space of the interpreter in MiB; past it Python raises MemoryError, and the session survives."""
    max_threads: PositiveInt = 1
    """Threads of the interpreter; more than 1 is refused for the superuser. Processes cannot be started at all."""

    interrupt_grace_s: ClassVar[float] = 1.0
    """Time that a call past its limit gets to end by KeyboardInterrupt before the session is killed."""
    session_cpu_s: ClassVar[float] = _SESSION_CPU_S
    """CPU time of all calls of a session."""
    session_wall_s: ClassVar[float] = _SESSION_WALL_S
    """Time from a session's start, after which it is killed even while it is idle."""
    tmp_mib: ClassVar[int] = 64
    """Size of the session's `/tmp`, the one place where it can write. It is held in memory beside `memory_mib`."""
    file_mib: ClassVar[int] = 64
    """Size of one file."""
    max_files: ClassVar[int] = 2000
    """Files and folders in `/tmp`; a session with more is killed."""
    max_open_files: ClassVar[int] = 64
    """Open file descriptors."""
    shown_output_bytes: ClassVar[int] = 8192
    """Output of one call that is kept, in UTF-8; what is left out between its start and its end is counted there."""
    printed_bytes: ClassVar[int] = 1 << 20
    """Output of one call after which it is stopped."""


class AllOutputShown(SandboxLimits):
    """The same for code whose whole output counts."""

    shown_output_bytes: ClassVar[int] = SandboxLimits.printed_bytes


class SandboxConfig(StrictModel):
    """How code written by a model is confined."""

    kind: Literal["bubblewrap"] = "bubblewrap"
    """A process in separate namespaces, without this machine's network, files or environment."""
    packages: tuple[_PackageName, ...] = ()
    """Distributions that the code may import, each with its dependencies (`sympy` needs `mpmath`)."""
    limits: SandboxLimits = SandboxLimits()

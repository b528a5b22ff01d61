"""How fast sandboxed sessions start and answer, and how much memory they hold.

Run: python tests/benchmarks/sandbox.py [sessions] [calls]

`sessions` are opened one after the other, then all at once, and each then runs `calls` calls of a few lines. CPU time
is that of all processes involved; unlike the rates it hardly depends on what else the machine does. Memory is the
proportional share (PSS) of an idle session that has run its calls, bubblewrap included. The last line is a call that
ends at its limit of output.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

import psutil
from measuring import numbers, show

from luffy.config.environment import SandboxConfig
from luffy.sandbox import ExecutionStatus, PythonSession, Sandbox, open_sandbox

CONFIG = SandboxConfig()
CODE = (
    "def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)\nprint(gcd(12345678, 87654321))\ngcd(2 ** 40, 6 ** 20)"
)
EXPECTED = "9\n1048576\n"


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def opened(sandbox: Sandbox, count: int) -> list[PythonSession]:
    """That many sessions, started at the same time."""
    return list(await asyncio.gather(*(sandbox.open(CONFIG.limits) for _ in range(count))))


async def closed(sessions: Sequence[PythonSession]) -> None:
    """End sessions at the same time."""
    await asyncio.gather(*(session.close() for session in sessions))


async def call(session: PythonSession) -> None:
    """One call, whose output is checked."""
    result = await session.run(CODE)
    assert (result.status, result.output) == (ExecutionStatus.OK, EXPECTED), result


async def calls(session: PythonSession, count: int) -> list[float]:
    """Seconds of calls, one after the other."""
    return [await timed(lambda: call(session)) for _ in range(count)]


def memory_mib() -> float:
    """Proportional share of all processes below this one."""
    below = psutil.Process().children(recursive=True)
    return sum(process.memory_full_info().pss for process in below) / (1 << 20)


def cpu_s() -> float:
    """CPU time of this process and of all that live below it, by the kernel's clocks of processes."""
    below = psutil.Process().children(recursive=True)
    return time.process_time() + sum(time.clock_gettime((~process.pid << 3) | 2) for process in below)


async def measure(num_sessions: int, num_calls: int) -> list[tuple[str, str]]:
    """Name and value of each line."""
    sandbox = await open_sandbox(CONFIG)

    async def one_after_the_other() -> None:
        for _ in range(num_sessions):
            await closed(await opened(sandbox, 1))

    singly_s = await timed(one_after_the_other)
    cpu_before = cpu_s()
    started = time.perf_counter()
    sessions = await opened(sandbox, num_sessions)
    together_s = time.perf_counter() - started
    start_cpu_s = (cpu_s() - cpu_before) / num_sessions
    seconds = await calls(sessions[0], num_calls)
    at_once_s = await timed(lambda: asyncio.gather(*(calls(session, num_calls) for session in sessions)))
    memory = memory_mib() / num_sessions
    flood_s = await timed(lambda: sessions[0].run("while True:\n    print('x' * 1000)"))
    close_s = await timed(lambda: closed(sessions))
    return [
        ("sessions/s, opened and closed one after the other", f"{num_sessions / singly_s:.1f}"),
        ("CPU time of a session's start, ms", f"{start_cpu_s * 1e3:.1f}"),
        (f"sessions/s, {num_sessions} opened at once", f"{num_sessions / together_s:.1f}"),
        (f"sessions/s, {num_sessions} closed at once", f"{num_sessions / close_s:.1f}"),
        ("calls/s of one session", f"{num_calls / sum(seconds):.0f}"),
        ("median of a call, ms", f"{statistics.median(seconds) * 1e3:.2f}"),
        (f"calls/s of {num_sessions} sessions at once", f"{num_sessions * num_calls / at_once_s:.0f}"),
        ("memory of a session, MiB", f"{memory:.1f}"),
        ("endless output until its result, ms", f"{flood_s * 1e3:.0f}"),
    ]


def main() -> None:
    """Print one line a measure."""
    show(("measure", "value"), asyncio.run(measure(*numbers(200, 100))))


if __name__ == "__main__":
    main()

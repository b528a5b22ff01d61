"""How long tests wait for what must happen: for events, never for a moment that is guessed.

Long enough for a loaded or slow machine. Only a test that fails waits this long; pytest's own limit is longer still.
"""

import subprocess
import time
from collections.abc import Callable, Iterable

import psutil

PATIENCE_S = 600.0
_LOOK_S = 0.05


def wait_until(condition: Callable[[], object], what: str = "the awaited event", every_s: float = _LOOK_S) -> None:
    """Return once `condition()` holds; fail when that takes longer than any machine needs.

    A look `every_s` seconds: less often where it has another process work, as a server.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        looked = time.process_time()
        if condition():
            return
        assert time.monotonic() < deadline, f"{what} has not come for {PATIENCE_S:g} s"
        # A look that is costly, at all processes, say, leaves the processor to those that are waited for.
        time.sleep(max(every_s, 12 * (time.process_time() - looked)))


def ran(command: Iterable[object], **options: object) -> subprocess.CompletedProcess[str]:
    """The ended command, whatever its exit code, with what it said."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE_S, **options)


def wait_until_ended(processes: Iterable[psutil.Process]) -> None:
    """Return once all have ended; whether somebody has taken note of their end does not matter."""
    left = list(processes)

    def have_ended() -> bool:
        left[:] = filter(lives, left)
        return not left

    wait_until(have_ended, "the end of processes")


def lives(process: psutil.Process | int) -> bool:
    """Whether a process still runs, also by its identifier; one that nobody has collected does not."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

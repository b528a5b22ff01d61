"""Programs that tests end, forked from the warm server of `warm_stages`, which has loaded their libraries."""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.patience import wait_until

from luffy.pipeline.warm_start import current_warm_server

ROOT = Path(__file__).parents[2]


class ForkedProgram:
    """`python -m MODULE ...`, which appends its output to `log`; started cold where there is no warm server."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        server = current_warm_server()
        warm = None if server is None else server.start(command, log, os.environ)
        if warm is None:
            with log.open("ab") as out:
                self._process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        else:
            self._process = warm

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def send(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """`kill -9`; returns once it has ended."""
        self.send(signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        wait_until(lambda: self.poll() is not None, "the end of the program")
        returncode = self.poll()
        assert returncode is not None
        return returncode

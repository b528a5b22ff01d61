"""Stages that a thread of the test supervises, so that the test can strike meanwhile."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Self

import psutil
from patience import PATIENCE_S
from ray_run import run_stages
from toy_run import Recorder

from luffy.errors import StageFailed


def named_below(process: psutil.Process, name: str) -> list[psutil.Process]:
    """Everything that it has started, of that name."""
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [child] if name in child.name() else []
    return found


class StagesInThread:
    """`work`, which supervises stages. Behind the block none of their processes is left."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._earlier = set(psutil.Process().children(recursive=True))
        self._thread = ThreadPoolExecutor(1)
        self._work = self._thread.submit(copy_context().run, work)  # in the context a warm server may be in use

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while not self.is_over():  # the test has failed
            for process in self.processes():
                process.kill()
        self._thread.shutdown()

    def is_over(self) -> bool:
        return self._work.done()

    def processes(self, name: str = "") -> list[psutil.Process]:
        """The stage that runs and all that it has started, of that name."""
        return [process for process in named_below(psutil.Process(), name) if process not in self._earlier]

    def stage(self) -> psutil.Process:
        """The stage program, which has started the others."""
        starters = {os.getpid(), *(process.pid for process in self._earlier)}
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                found += [process] if process.ppid() in starters else []
        (stage,) = found
        return stage

    def wait(self) -> None:
        """Return when all stages are made; raises StageFailed."""
        self._work.result(timeout=PATIENCE_S)

    def failure(self) -> StageFailed:
        """What ends the run."""
        failure = self._work.exception(timeout=PATIENCE_S)
        assert isinstance(failure, StageFailed), failure
        return failure


class RayStagesInThread(StagesInThread):
    """The stages of a start of `ray_run.py`."""

    def __init__(self, workspace: Path, nodes: str, *overrides: str) -> None:
        self.recorder = Recorder()
        super().__init__(lambda: run_stages(workspace, nodes.split(","), overrides, self.recorder))

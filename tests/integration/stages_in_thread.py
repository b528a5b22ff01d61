"""Stages that a thread of the test supervises, so that the test can strike meanwhile."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Self

import psutil
from support.patience import PATIENCE_S
from toy_run import Recorder
from vllm_subjects import WIDE

from luffy.config import load_experiment
from luffy.errors import StageFailed
from luffy.pipeline.experiment import ExperimentRun, open_experiment
from luffy.pipeline.supervise import stage_command
from luffy.pipeline.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
UNDER_RAY = (
    *("chain=rl", "method=luffy", "cluster=ray", "rl.max_staleness=1", WIDE),
    "execution.vllm={cpu_kv_cache_gb: 0.1, max_num_seqs: 32}",
)


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
        found = []
        for child in set(psutil.Process().children(recursive=True)) - self._earlier:
            with suppress(psutil.NoSuchProcess):
                found += [child] if name in child.name() else []
        return found

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
    """Stages of smoke.yaml under Ray; `nodes` are parted by commas."""

    def __init__(self, workspace: Path, nodes: str, *overrides: str) -> None:
        self.recorder = Recorder()

        def work() -> None:
            config = load_experiment(ROOT / "exp_configs" / "smoke.yaml", [*UNDER_RAY, *overrides])
            # Without the code in the keys: an edit between two starts must not make them different stages.
            experiment = open_experiment(config, Workspace(workspace), code=lambda kind, rooms: {})
            run = ExperimentRun(experiment, experiment.workspace.new_run("ray", {}), stage_command)
            for node in nodes.split(","):
                run.execute(node, self.recorder)

        super().__init__(work)

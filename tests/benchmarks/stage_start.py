"""What starting its stages costs a chain: each in a fresh process, forked from the warm server, or all in one process.

Run: python tests/benchmarks/stage_start.py [REPETITIONS]

`cold` and `warm` make the stages of `exp_configs/smoke.yaml` as `luffy run` does, without Prefect. `one` runs the same
programs one after the other in the process that has imported them: what a host process for all stages would reach at
best. Each way begins in a new process and a new workspace; its libraries are part of its time. Of the repetitions the
fastest counts, in seconds of a clock and of the processor.
"""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from measuring import ROOT, numbers, show

from luffy.pipeline.experiment import StageObserver, start_run
from luffy.pipeline.warm_start import WarmServer

_WAYS = ("cold", "warm", "one")
_MARK = "stage:"


def make(way: str, workspace: Path) -> None:
    """Make the chain; prints the seconds of each stage."""
    from support.stages import in_process, opened

    experiment = opened(workspace, "smoke.yaml")
    experiment.workspace.prepare()
    with ExitStack() as stack:
        if way == "warm":
            stack.enter_context(WarmServer(experiment.workspace.warm_log).use())
        if way == "one":
            stack.enter_context(in_process())
        run = stack.enter_context(start_run(experiment))
        for node in experiment.nodes:
            began = time.monotonic()
            run.execute(node.name, StageObserver())
            print(_MARK, node.name, time.monotonic() - began)


def measured(way: str) -> tuple[float, float, dict[str, float]]:
    """Seconds of clock and processor that a way takes, and the seconds of each stage."""
    with TemporaryDirectory() as workspace:
        began, before = time.monotonic(), sum(os.times()[2:4])  # of child processes
        program = [sys.executable, __file__, way, workspace]
        shown = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        wall, used = time.monotonic() - began, sum(os.times()[2:4]) - before
    stages = dict(line.split()[1:] for line in shown.splitlines() if line.startswith(_MARK))
    return wall, used, {name: float(seconds) for name, seconds in stages.items()}


def main() -> None:
    """Print a row for each way."""
    (repetitions,) = numbers(3)
    rows = []
    for way in _WAYS:
        runs = [measured(way) for _ in range(repetitions)]
        wall, used, stages = min(runs, key=lambda run: run[0])
        rows.append((way, f"{wall:.1f}", f"{used:.1f}", *(f"{seconds:.1f}" for seconds in stages.values())))
    show(("way", "clock", "processor", *stages), rows, "Seconds of the smoke chain")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in _WAYS:
        make(sys.argv[1], Path(sys.argv[2]))
    else:
        main()

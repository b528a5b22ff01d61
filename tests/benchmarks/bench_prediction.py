"""How well `luffy bench` predicts a run: both in turn, in a new workspace, stage by stage.

Run: python tests/benchmarks/bench_prediction.py CONFIG [KEY.PATH=VALUE ...]      e.g. arithmetic rl.steps=3

The stage's real time is from the writing of its job to that of its manifest, so it includes the start of its process.
What a run does between its stages, Prefect's start first of all, is in the last row alone.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from luffy.config import load_experiment
from luffy.costs.forecast import forecast
from luffy.pipeline.chain.job import JOB_FILE
from luffy.pipeline.chain.manifest import MANIFEST_FILE
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace


def luffy(command: str, arguments: list[str], workspace: Path) -> float:
    """Seconds of `luffy COMMAND`, whose output goes to this terminal."""
    began = time.monotonic()
    program = [sys.executable, "-m", "luffy", command, *arguments, "--workspace", str(workspace)]
    subprocess.run(program, check=True)
    return time.monotonic() - began


def main() -> None:
    """Print one line a stage."""
    arguments = sys.argv[1:] or ["arithmetic", "rl.steps=3"]
    config = load_experiment(arguments[0], arguments[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench_s = luffy("bench", arguments, folder)
        experiment = open_experiment(config, Workspace(folder))
        plans = experiment.plan()
        predicted = {each.node: each.seconds for each in forecast(config, plans, experiment.workspace)}
        run_s = luffy("run", arguments, folder)
        real = {
            plan.node.name: (plan.directory / MANIFEST_FILE).stat().st_mtime
            - (plan.directory / JOB_FILE).stat().st_mtime
            for plan in plans
            if plan.action != "reuse"
        }
    show(predicted, real, run_s, bench_s)


def show(predicted: dict[str, float | None], real: dict[str, float], run_s: float, bench_s: float) -> None:
    """Print what was predicted beside what it took."""
    table = Table("stage", "predicted s", "real s", "predicted / real", title=f"the bench took {bench_s:.0f} s")
    for node, seconds in real.items():
        expected = predicted[node]
        ratio = "-" if expected is None else f"{expected / seconds:.2f}"
        table.add_row(node, "-" if expected is None else f"{expected:.1f}", f"{seconds:.1f}", ratio)
    total = sum(predicted[node] or 0.0 for node in real)
    stages = sum(real.values())
    table.add_row("all stages", f"{total:.1f}", f"{stages:.1f}", f"{total / stages:.2f}")
    table.add_row("the whole command", f"{total:.1f}", f"{run_s:.1f}", f"{total / run_s:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()

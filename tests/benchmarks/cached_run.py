"""What a run costs whose stages are all finished: wall time, and how much of it is this package's own.

Run: python tests/benchmarks/cached_run.py [--rounds 5] [--workspace DIR]

The smoke chain is made once (in DIR, if it is not finished there). Then in turn, `rounds` times: `python
flows/full_pipeline.py exp_configs/smoke.yaml` against a running Prefect server; the yardstick, a Prefect flow against
the same server with as many tasks, which do nothing; and the flow with its embedded server. Each is a process from its
start to its end. What is ours is the difference between the first two: imports, keys, reuse, display, artifacts.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from pipeline_overhead import FLOW, ROOT, timed_run
from rich.console import Console
from rich.table import Table

from luffy.config import load_experiment
from luffy.flows.prefect_api import ApiServer, set_environment
from luffy.pipeline.graph import build_graph

YARDSTICK = "--yardstick"
CACHED = "against a running server"
ALONE = "yardstick: Prefect alone"
NUM_TASKS = len(build_graph(load_experiment(ROOT / FLOW[-1])))


def yardstick() -> None:
    """What Prefect itself takes for a flow of so many tasks, told to keep nothing, as ours are."""
    from prefect import flow, task
    from prefect.cache_policies import NO_CACHE

    @task(retries=0, cache_policy=NO_CACHE, persist_result=False)
    def nothing() -> None: ...

    @flow(retries=0, persist_result=False)
    def as_many_tasks() -> None:
        for _ in range(NUM_TASKS):
            nothing()

    as_many_tasks()


def own_imports_s(command: Sequence[str], env: Mapping[str, str]) -> float:
    """Seconds that the modules of this package take to load, without what they import from others."""
    lines = subprocess.run(
        command, cwd=ROOT, env={**env, "PYTHONPROFILEIMPORTTIME": "1"}, capture_output=True, text=True, check=True
    ).stderr.splitlines()
    rows = [line.removeprefix("import time:").split("|") for line in lines if line.startswith("import time:")]
    own = [int(spent) for spent, _, name in rows[1:] if name.strip().partition(".")[0] in ("luffy", "flows", "tasks")]
    return sum(own) / 1e6


def measure(workspace: Path, rounds: int) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """Wall and CPU seconds of each run by its kind, and those of our imports."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env["LUFFY_WORKSPACE"] = str(workspace)
    command = [sys.executable, *FLOW]
    timed_run(command, env)
    with tempfile.TemporaryDirectory() as home:
        set_environment(Path(home), debug=False)
        server = ApiServer(Path(home))
        server.wait()
        served = {**os.environ, **env, "PREFECT_API_URL": server.url}
        runs = {
            CACHED: (command, served),
            ALONE: ([sys.executable, __file__, YARDSTICK], served),
            "with its embedded server": (command, env),
        }
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        try:
            for _ in range(rounds):
                for name, (started, surroundings) in runs.items():
                    spent[name].append(timed_run(started, surroundings))
            return spent, own_imports_s(command, served)
        finally:
            server.stop()


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workspace", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spent, imports = measure((options.workspace or Path(folder)).resolve(), options.rounds)
    table = Table("run", "wall s", "CPU s", title=f"Medians of {options.rounds}")
    medians = {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in spent.items()}
    medians["ours: the difference"] = [a - b for a, b in zip(medians[CACHED], medians[ALONE], strict=True)]
    for name, columns in medians.items():
        table.add_row(name, *(f"{value:.2f}" for value in columns))
    Console().print(table, f"of which loading our own modules: {imports:.2f} s (under Python's import profile)")


if __name__ == "__main__":
    yardstick() if YARDSTICK in sys.argv else main()

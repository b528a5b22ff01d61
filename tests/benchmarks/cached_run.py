"""What a run costs whose stages are all finished: wall time, and how much of it is this package's own.

Run: python tests/benchmarks/cached_run.py [--rounds 5] [--workspace DIR]

The smoke chain is made once (in DIR, if it is not finished there). Then in turn, `rounds` times: `python
flows/full_pipeline.py exp_configs/smoke.yaml` against a running Prefect server; the yardstick, a Prefect flow against
the same server with as many tasks, which do nothing; and the flow with its embedded server. Each is a process from its
start to its end. What is ours is the difference between the first two.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from measuring import ROOT, environment_without_server, show

from luffy.config import load_experiment
from luffy.flows.prefect_api import ApiServer, set_environment
from luffy.pipeline.graph import build_graph

FLOW = ("flows/full_pipeline.py", "exp_configs/smoke.yaml")
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


def timed_run(command: Sequence[str], env: Mapping[str, str]) -> tuple[float, float]:
    """Wall seconds of one run, and CPU seconds of it and all its children."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=env)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(workspace: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each run by its kind."""
    env = environment_without_server(LUFFY_WORKSPACE=str(workspace))
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
            return spent
        finally:
            server.stop()


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workspace", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spent = measure((options.workspace or Path(folder)).resolve(), options.rounds)
    medians = {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in spent.items()}
    medians["ours: the difference"] = [a - b for a, b in zip(medians[CACHED], medians[ALONE], strict=True)]
    rows = [(name, *(f"{value:.2f}" for value in columns)) for name, columns in medians.items()]
    show(("run", "wall s", "CPU s"), rows, f"Medians of {options.rounds}")


if __name__ == "__main__":
    yardstick() if YARDSTICK in sys.argv else main()

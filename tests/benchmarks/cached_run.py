"""What a run costs whose stages are all finished: wall time, and how much of it is this package's own.

Run: python tests/benchmarks/cached_run.py [rounds]

The smoke chain is made once. Then in turn, `rounds` times: `python flows/full_pipeline.py exp_configs/smoke.yaml`
against a running Prefect server; the yardstick, a Prefect flow against the same server with as many tasks, which do
nothing; and the flow with its embedded server. Each is a process from its start to its end. What is ours is the
difference between the first two: imports, keys, reuse, display, artifacts.
"""

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

from flows.prefect_session import ApiServer, set_environment
from luffy.config import load_experiment
from luffy.pipeline.graph import build_graph

YARDSTICK = "--yardstick"
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


def main() -> None:
    """Print the medians."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with tempfile.TemporaryDirectory() as folder:
        env = {**plain, "LUFFY_WORKSPACE": folder}
        command = [sys.executable, *FLOW]
        timed_run(command, env)
        set_environment(Path(folder) / "server", debug=False)
        server = ApiServer(Path(folder) / "server")
        server.wait()
        served = {**os.environ, **env, "PREFECT_API_URL": server.url}
        runs = {
            "against a running server": (command, served),
            "yardstick: Prefect alone": ([sys.executable, __file__, YARDSTICK], served),
            "with its embedded server": (command, env),
        }
        try:
            spent = {name: [] for name in runs}
            for _ in range(rounds):
                for name, (started, surroundings) in runs.items():
                    spent[name].append(timed_run(started, surroundings))
            imports = own_imports_s(command, served)
        finally:
            server.stop()
    table = Table("run", "wall s", "CPU s", title=f"Medians of {rounds}")
    medians = {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in spent.items()}
    cached, alone = medians["against a running server"], medians["yardstick: Prefect alone"]
    medians["ours: the difference"] = [ours - theirs for ours, theirs in zip(cached, alone, strict=True)]
    for name, columns in medians.items():
        table.add_row(name, *(f"{value:.2f}" for value in columns))
    Console().print(table, f"of which loading our own modules: {imports:.2f} s (under Python's import profile)")


if __name__ == "__main__":
    yardstick() if YARDSTICK in sys.argv else main()

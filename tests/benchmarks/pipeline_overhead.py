"""What the pipeline costs beside its stages: the smoke chain from nothing, and again with everything reused.

Run: python tests/benchmarks/pipeline_overhead.py [rounds]

Each run is `python flows/full_pipeline.py exp_configs/smoke.yaml` with its embedded Prefect server, as a user starts
it; the first round's first run also makes the server's database. Wall time and CPU time (user + system, all children).
`cached_run.py` takes the reused ones apart.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
FLOW = ("flows/full_pipeline.py", "exp_configs/smoke.yaml")


def timed_run(command: Sequence[str], env: Mapping[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of one run."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=env)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print one line a run."""
    table = Table("run", "wall s", "CPU s")
    for index in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("from nothing", "all reused", "all reused"):
                wall, cpu = timed_run([sys.executable, *FLOW], {**os.environ, "LUFFY_WORKSPACE": folder})
                table.add_row(f"{index + 1}: {name}", f"{wall:.1f}", f"{cpu:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()

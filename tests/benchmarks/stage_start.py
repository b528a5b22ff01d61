"""What the warm server saves: the smoke chain from nothing, its stages forked from loaded libraries or started cold.

Run: python tests/benchmarks/stage_start.py [rounds]

Each round runs the chain both ways, in turn, in workspaces of their own: `luffy run smoke` with its embedded Prefect
server. The last column is the mean time from the decision to run a stage to its program's first event, which is when it
has loaded its libraries and holds its lock. On a machine with a GPU both ways are cold.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ROOT, numbers, show

_WARM = "from luffy.cli.main import main; raise SystemExit(main(['run', 'smoke']))"
_COLD = f"import luffy.pipeline.warm_start as start; start.can_start_warm = lambda: False; {_WARM}"
WAYS = {"warm": _WARM, "cold": _COLD}


def start_delay_s(stage: Path) -> float:
    """Seconds from the job's file, which is written right before the program is started, to its first event."""
    first = json.loads((stage / "events.jsonl").read_text(encoding="utf-8").splitlines()[0])
    return float(first["time"]) - (stage / "config.yaml").stat().st_mtime


def run_chain(program: str) -> tuple[float, float]:
    """Wall seconds of a chain from nothing, and the mean start of its stages."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        environment = {**os.environ, "LUFFY_WORKSPACE": folder}
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, env=environment)
        wall_s = time.perf_counter() - began
        return wall_s, statistics.mean(start_delay_s(stage) for stage in Path(folder).glob("stages/*/*"))


def main() -> None:
    """Print one row a run."""
    (rounds,), rows = numbers(3), []
    for index in range(rounds):
        for name, program in WAYS.items():
            wall_s, start_s = run_chain(program)
            rows.append((f"{index + 1}: {name}", f"{wall_s:.1f}", f"{start_s:.2f}"))
    show(("run", "chain, s", "start of a stage, s"), rows)


if __name__ == "__main__":
    main()

"""What grows in a long run: memory, open files and files on disk of the smoke task over thousands of RL steps.

Run: python tests/benchmarks/long_run.py [--marks 100 500 1000 2000] [--workspace DIR]

The run is `python flows/full_pipeline.py exp_configs/smoke.yaml rl.steps=STEPS` with its own Prefect server, as a user
starts it; it ends ten steps after the last mark. At each mark the RL stage is suspended for a moment, measured, and its
directory copied; a stage program that resumes from the copy gives the time of a resume. A row is printed as soon as its
mark is reached. Memory is the resident set; a step is the median of `perf/step_s` over the last hundred steps.
"""

import argparse
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

import psutil
from measuring import ROOT

from luffy.pipeline.disk import measure
from luffy.pipeline.events import EVENTS_FILE, EventReader
from luffy.processes import die_with
from luffy.tracking.metrics import METRICS_FILE, read_metrics

CONFIG = "exp_configs/smoke.yaml"
MIB = 1 << 20
KIB = 1 << 10
STEP_TIME = "perf/step_s"
POLL_S = 0.2
STEPS_AFTER = 10


def main() -> None:
    """Print one line a mark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--marks", type=int, nargs="+", default=[100, 500, 1000, 2000])
    parser.add_argument("--workspace", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = arguments.workspace or Path(folder) / "workspace"
        with started_flow(workspace, max(arguments.marks) + STEPS_AFTER) as flow:
            for mark in sorted(arguments.marks):
                directory = reached(flow, workspace, mark)
                figures = measured(psutil.Process(flow.pid), directory, workspace, Path(folder))
                if mark == min(arguments.marks):
                    print("\t".join(figures))
                print("\t".join(f"{value:.4g}" for value in figures.values()), flush=True)
            assert flow.wait() == 0, "the run failed"


def started_flow(workspace: Path, steps: int) -> subprocess.Popen[bytes]:
    """The running flow; it dies with this process."""
    parent = os.getpid()
    return subprocess.Popen(
        [sys.executable, "flows/full_pipeline.py", CONFIG, f"rl.steps={steps}"],
        cwd=ROOT,
        env={**os.environ, "LUFFY_WORKSPACE": str(workspace)},
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: die_with(parent),
    )


def reached(flow: subprocess.Popen[bytes], workspace: Path, mark: int) -> Path:
    """The directory of the RL stage, once it has logged step `mark`."""
    while True:
        for path in workspace.glob(f"stages/rl/*/{METRICS_FILE}"):
            if path.read_bytes().count(b"\n") >= mark:
                return path.parent
        assert flow.poll() is None, "the run ended early"
        time.sleep(POLL_S)


def measured(flow: psutil.Process, directory: Path, workspace: Path, scratch: Path) -> dict[str, float]:
    """Everything at this moment; the stage stands still while it is read."""
    started = [event for event in EventReader(directory / EVENTS_FILE).read() if event.kind == "started"]
    stage, copy = psutil.Process(started[-1].pid), scratch / "copy"
    stage.suspend()
    try:
        memory, files = stage.memory_info().rss / MIB, stage.num_fds()
        shutil.copytree(directory, copy)
    finally:
        stage.resume()
    rows = read_metrics(copy / METRICS_FILE)
    server = next(child for child in flow.children() if "uvicorn" in child.cmdline())
    database = workspace / "prefect" / "prefect.db"
    figures = {
        "step": len(rows),
        "stage_mib": memory,
        "stage_files": files,
        "flow_mib": flow.memory_info().rss / MIB,
        "flow_files": flow.num_fds(),
        "server_mib": server.memory_info().rss / MIB,
    }
    for name, path in {"journal": "journal", "metrics": METRICS_FILE, "samples": "samples.jsonl",
                       "checkpoints": "checkpoints", "events": EVENTS_FILE}.items():  # fmt: skip
        figures[f"{name}_kib"] = measure(copy / path) / KIB
    figures["database_kib"] = measure(*database.parent.glob(f"{database.name}*")) / KIB
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60)) as connection:
        (figures["artifacts"],) = connection.execute("SELECT COUNT(*) FROM artifact").fetchone()
    figures["step_s"] = median(row[STEP_TIME] for row in rows[-100:])
    figures["resume_s"] = resumed(copy, len(rows))  # last, since it changes the copy
    shutil.rmtree(copy)
    return figures


def resumed(copy: Path, num_rows_before: int) -> float:
    """Seconds from the start of a stage program on a copy of the directory to its next logged step."""
    newest = max(int(path.name.rpartition("_")[2]) for path in (copy / "checkpoints").glob("step_*"))
    command = [sys.executable, "-m", "luffy.stages.rl", "--config", str(copy / "config.yaml"), "--out", str(copy)]
    began = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as stage:
        while (found := read_metrics(copy / METRICS_FILE)) and found[-1]["step"] in (num_rows_before, newest):
            assert stage.poll() is None, "the stage could not resume"
            time.sleep(POLL_S)
        took = time.perf_counter() - began
        stage.terminate()
    return took


if __name__ == "__main__":
    main()

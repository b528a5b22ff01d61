"""What hundreds of runs in one workspace cost: the commands that look through it, and the pages of Prefect's UI.

Run: python tests/benchmarks/workspace_size.py [--runs 5 50 500] [--rounds 3]

Two smoke runs with different seeds are made, and copies of them fill the workspace up. Every copy has all of its stages
to itself, under keys and a run name of its own: nothing is shared, which is the worst case. A command is a process from
its start to its end, and its time the median over the rounds. The first column has the two real runs alone. `luffy run`
leaves a run of its own each time, without stages. Then flow runs as these would have left (as many tasks, log lines and
artifacts) are written into a new Prefect database through its API, and what the UI asks for is asked and timed.
"""

import argparse
import json
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
from measuring import ROOT, environment_without_server, show
from server_load import PAGES

from luffy.flows.prefect_api import ApiServer, set_environment
from luffy.pipeline.workspace import RUN_FILE

SEEDS = (1, 2)
COMMANDS = {
    "`luffy show`": ("show",),
    "`luffy plan` (all reused)": ("plan", "smoke", "seed=1"),
    "`luffy plan` (nothing there)": ("plan", "smoke", "seed=3"),
    "`luffy gc`": ("gc",),
    "`luffy gc --keep-runs 1`": ("gc", "--keep-runs", "1"),
    "`luffy show --leaderboard`": ("show", "--leaderboard"),
    "`luffy run` (all reused)": ("run", "smoke", "seed=1"),
}
TEXTS = (".json", ".jsonl", ".html", ".md", ".yaml", ".txt")
LOG_LINES, ARTIFACTS = 30, 5
TIMEOUT_S = 600.0


def made(workspace: Path) -> list[Path]:
    """Make the runs that are copied; returns their directories."""
    for seed in SEEDS:
        luffy(workspace, "run", "smoke", f"seed={seed}")
    return sorted((workspace / "runs").iterdir())


def luffy(workspace: Path, *arguments: str) -> float:
    """Seconds of one command. Raises CalledProcessError where it fails."""
    env = environment_without_server()
    command = [sys.executable, "-m", "luffy", *arguments, "--workspace", str(workspace)]
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


def add_copy(run: Path, number: int) -> None:
    """Copy a run and all of its stages, with a new key for each stage and a new name for the run."""
    workspace = run.parents[1]
    record = json.loads((run / RUN_FILE).read_text())
    keys = {stage["key"]: secrets.token_hex(8) for stage in record["stages"].values()}
    for stage in record["stages"].values():
        source = Path(stage["directory"])
        copy_tree(source, source.with_name(keys[stage["key"]]), keys)
    copy_tree(run, workspace / "runs" / f"copy-{number}", keys)


def copy_tree(source: Path, target: Path, renamed: dict[str, str]) -> None:
    """Copy a folder; in its texts and links the keys of `renamed` become its values, so that sizes of stages stay."""
    shutil.copytree(source, target, symlinks=True)
    for path in target.rglob("*"):
        if path.is_symlink():
            place = replaced(str(path.readlink()), renamed)
            path.unlink()
            path.symlink_to(place)
        elif path.suffix in TEXTS:
            path.write_text(replaced(path.read_text(), renamed))


def replaced(text: str, renamed: dict[str, str]) -> str:
    """`text` with each key of `renamed` replaced by its value."""
    for old, new in renamed.items():
        text = text.replace(old, new)
    return text


def time_commands(numbers: Sequence[int], rounds: int) -> None:
    """Print a row for every command, a column for every number of runs."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        originals = made(workspace)
        columns = [timed(workspace, rounds)]
        done = len(originals)
        for number in numbers:
            for count in range(done, number):
                add_copy(originals[count % len(originals)], count)
            done = number
            columns.append(timed(workspace, rounds))
        stages = sum(len(list(kind.iterdir())) for kind in (workspace / "stages").iterdir())
    rows = [(name, *(f"{column[name]:.1f}" for column in columns)) for name in COMMANDS]
    show(("seconds with", *(f"{number} runs" for number in (len(SEEDS), *numbers))), rows)
    print(f"{numbers[-1]} runs have {stages} stage directories")


def timed(workspace: Path, rounds: int) -> dict[str, float]:
    """Median seconds of every command; the rounds go through all commands in turn."""
    times = [{name: luffy(workspace, *command) for name, command in COMMANDS.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in times) for name in COMMANDS}


@contextmanager
def prefect_api(folder: Path) -> Iterator[httpx.Client]:
    """A Prefect server with an empty SQLite database."""
    set_environment(folder, debug=False)
    server = ApiServer(folder)
    try:
        server.wait()
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
            yield client
    finally:
        server.stop()


def time_pages(numbers: Sequence[int], rounds: int) -> None:
    """Print a row for every request of the UI, a column for every number of flow runs."""
    columns: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, prefect_api(Path(folder)) as client:
        flow = client.post("/flows/", json={"name": "full-pipeline"}).json()["id"]
        done = 0
        for number in numbers:
            for each in range(done, number):
                add_flow_run(client, flow, f"smoke-{each}")
            done = number
            columns.append({page: asked(client, page, rounds) for page in PAGES})
    rows = [(page, *(f"{column[page]:.3f}" for column in columns)) for page in PAGES]
    show(("seconds for", *(f"{number} flow runs" for number in numbers)), rows)


def add_flow_run(client: httpx.Client, flow: str, name: str) -> None:
    """A completed flow run with the task runs, log lines and artifacts of a smoke run."""
    state = {"type": "COMPLETED", "name": "Completed"}
    run = posted(client, "/flow_runs/", {"flow_id": flow, "name": name, "state": state})
    for stage in ("prepare_data", "base", "sft", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl", "report"):
        task = {"flow_run_id": run, "name": stage, "task_key": stage, "dynamic_key": "0", "state": state}
        posted(client, "/task_runs/", task)
    now = datetime.now(UTC)
    lines = [
        {"name": "luffy", "level": 20, "message": f"step {line}", "flow_run_id": run,
         "timestamp": (now + timedelta(milliseconds=line)).isoformat()}
        for line in range(LOG_LINES)
    ]  # fmt: skip
    client.post("/logs/", json=lines).raise_for_status()
    for number in range(ARTIFACTS):
        artifact = {"key": f"{name}-{number}", "type": "markdown", "data": "| a | b |\n" * 50, "flow_run_id": run}
        posted(client, "/artifacts/", artifact)


def posted(client: httpx.Client, path: str, body: dict[str, object]) -> str:
    """The id of what was made."""
    answer = client.post(path, json=body).raise_for_status()
    return str(answer.json()["id"])


def asked(client: httpx.Client, page: str, rounds: int) -> float:
    """Median seconds of one request of the UI."""
    path, body = PAGES[page]
    times = []
    for _ in range(rounds):
        began = time.monotonic()
        client.post(f"/{path}", json=body).raise_for_status()
        times.append(time.monotonic() - began)
    return statistics.median(times)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[5, 50, 500])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    numbers = sorted(arguments.runs)
    time_commands(numbers, arguments.rounds)
    time_pages(numbers, arguments.rounds)


if __name__ == "__main__":
    main()

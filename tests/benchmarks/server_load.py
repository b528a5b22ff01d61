"""Prefect's server under the load of a shared machine: many runs submitted at once, over SQLite and over PostgreSQL.

Run: python tests/benchmarks/server_load.py [--runs 40] [--limit 4] [--databases sqlite postgresql]

Each database has a `luffy serve` of its own in a new workspace. All runs are submitted at once; each needs the data and
the base policy of `smoke`, which the first one makes and the others reuse. While they wait and run, what the UI's pages
ask of the server is asked again and again, and timed. Printed for each database: how long the runs took, how they
ended, the most runs at one time, and the times of the requests. Exit code 1 if a run did not complete, or if there were
more at one time than the limit allows. PostgreSQL (its programs `initdb` and `pg_ctl`) is started for the purpose and
deleted afterwards; as root, under the user `postgres`.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from measuring import ROOT, environment_without_server, show
from support.postgres import PROGRAMS, postgresql

from luffy.flows.prefect_api import free_port

PAGES = {
    "runs": ("flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 20}),
    "count by state": ("flow_runs/count", {"flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}}),
    "tasks": ("task_runs/filter", {"limit": 50}),
    "logs": ("logs/filter", {"sort": "TIMESTAMP_DESC", "limit": 200}),
    "artifacts": ("artifacts/latest/filter", {"limit": 20}),
    "events": ("events/filter", {"limit": 50}),
}
"""What pages of the UI ask."""
UNFINISHED = {"state": {"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING", "CANCELLING"]}}}
RUNNING = {"state": {"type": {"any_": ["RUNNING"]}}}
TIMEOUT_S = 600.0


@dataclass
class Load:
    """What one database was seen to do."""

    seconds: float = 0.0
    most_running: int = 0
    states: dict[str, int] = field(default_factory=dict)
    requests_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@contextmanager
def served(folder: Path, limit: int, url: str | None) -> Iterator[str]:
    """The address of the API of a `luffy serve` with its workspace in `folder`."""
    port = free_port()
    database = {} if url is None else {"PREFECT_SERVER_DATABASE_CONNECTION_URL": url}
    command = [sys.executable, "flows/serve.py", "--port", str(port), "--limit", str(limit)]
    process = subprocess.Popen(
        [*command, "--workspace", str(folder / "workspace")],
        cwd=ROOT,
        env=environment_without_server(PYTHONUNBUFFERED="1", **database),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    said = []
    while not (said and said[-1].startswith("Ctrl-C ends")):
        said.append(process.stdout.readline())
        assert said[-1], "".join(said)
    try:
        yield f"http://127.0.0.1:{port}/api"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)


def measure(api: str, runs: int) -> Load:
    """Submit the runs, and watch until all have ended."""
    load = Load()
    with httpx.Client(base_url=api, timeout=TIMEOUT_S) as client:
        (deployment,) = (
            each for each in client.post("/deployments/filter", json={}).json() if each["name"] == "smoke"
            and each["entrypoint"].endswith("full_pipeline")
        )  # fmt: skip
        began = time.monotonic()
        for _ in range(runs):
            parameters = {"overrides": ["stages=[prepare_data, base]", "base.steps=5"]}
            path = f"/deployments/{deployment['id']}/create_flow_run"
            client.post(path, json={"parameters": parameters}).raise_for_status()
        while client.post("/flow_runs/count", json={"flow_runs": UNFINISHED}).json():
            for page, (path, body) in PAGES.items():
                asked = time.monotonic()
                client.post(f"/{path}", json=body).raise_for_status()
                load.requests_s[page].append(time.monotonic() - asked)
            running = client.post("/flow_runs/count", json={"flow_runs": RUNNING}).json()
            load.most_running = max(load.most_running, running)
            time.sleep(0.5)
        load.seconds = time.monotonic() - began
        for run in client.post("/flow_runs/filter", json={"limit": 200}).json():
            load.states[run["state_name"]] = load.states.get(run["state_name"], 0) + 1
    return load


def main() -> None:
    """Print the runs of each database, and the times of its requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--databases", nargs="+", choices=("sqlite", "postgresql"), default=("sqlite", "postgresql"))
    arguments = parser.parse_args()
    if "postgresql" in arguments.databases and PROGRAMS is None:
        sys.exit("error: PostgreSQL's programs are not in /usr/lib/postgresql; install it, or give --databases sqlite")
    loads = {}
    for database in arguments.databases:
        own = postgresql() if database == "postgresql" else nullcontext()
        with tempfile.TemporaryDirectory() as folder, own as url, served(Path(folder), arguments.limit, url) as api:
            loads[database] = measure(api, arguments.runs)
    print_loads(loads)
    good = all([*load.states] == ["Completed"] and load.most_running <= arguments.limit for load in loads.values())
    sys.exit(0 if good else 1)


def print_loads(loads: dict[str, Load]) -> None:
    """Print both tables."""
    rows = []
    for database, load in loads.items():
        ended = ", ".join(f"{count} {state}" for state, count in sorted(load.states.items()))
        rows.append((database, f"{load.seconds:.0f}", ended, load.most_running))
    show(("database", "s for all runs", "ended as", "most at one time"), rows)
    rows = []
    for page in PAGES:
        cells = []
        for load in loads.values():
            found = load.requests_s[page]
            late = statistics.quantiles(found, n=20)[-1] if len(found) > 1 else found[0]
            cells.append(f"{statistics.median(found):.2f}, {late:.2f}, {max(found):.2f}")
        rows.append((page, *cells))
    show(("the UI asks for", *(f"{database}: median, 95 %, longest (s)" for database in loads)), rows)


if __name__ == "__main__":
    main()

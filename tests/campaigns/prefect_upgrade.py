"""A database that an older Prefect 3 has made and used, opened by `luffy serve`.

Run: python tests/campaigns/prefect_upgrade.py --old VENV/bin/python [--postgresql] [--folder DIR]

VENV is an environment with an older Prefect and nothing of luffy, as made by `pip install prefect==3.4.25 asyncpg
importlib_metadata fastapi==0.116.1` (with the newest FastAPI the older server does not start). Its server gets luffy's
automations, a notification block, a flow run that its own client executes, and one that was running when the server was
killed. Then `luffy serve` opens the database, and a new run is made. A line is printed for each observation; exit code
1 when one of them differs from what is promised. Two minutes on an idle machine.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]

from patience import PATIENCE_S, wait_until  # noqa: E402
from postgres import postgresql  # noqa: E402
from test_serve import SHORT, Checkout  # noqa: E402
from webhook import messages_to  # noqa: E402

from luffy.flows.alerts import Alerts, keep_automations  # noqa: E402
from luffy.flows.api_client import ApiClient  # noqa: E402
from luffy.flows.prefect_session import answers  # noqa: E402
from luffy.processes import signal_group  # noqa: E402

URL = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
NOTIFY = "custom-webhook/lab"
FLOW = """
from prefect import flow, task
from prefect.artifacts import create_markdown_artifact

@task
def stage():
    create_markdown_artifact("# a page", key="old-page")
    return 7

@flow(name="full-pipeline", flow_run_name="old one", log_prints=True)
def full_pipeline():
    print("a line of the log")
    return stage()

full_pipeline()
"""


@contextmanager
def old_server(python: Path, checkout: Checkout, environment: Mapping[str, str]) -> Iterator[ApiClient]:
    """The server of the other environment, killed at the end."""
    command = [python, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(checkout.port)]
    with (checkout.root.parent / "old_server.txt").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(checkout.api, timeout_s=5.0) or server.poll() is not None, "the old server")
        assert server.poll() is None, "the old server did not start"
        yield ApiClient(checkout.api)
    finally:
        signal_group(server.pid, signal.SIGKILL)
        server.wait()


def use(python: Path, api: ApiClient, environment: Mapping[str, str]) -> None:
    """Fill the database, as an older luffy would have."""
    keep_automations(api, Alerts(NOTIFY))
    api.ask("POST", "work_pools/", {"name": "luffy", "type": "process"}).raise_for_status()
    client = {**environment, "PREFECT_API_URL": api._url}
    subprocess.run([python, "-c", FLOW], env=client, check=True, capture_output=True, timeout=PATIENCE_S)
    flow = api.rows("flows")[0]["id"]
    deployment = {"name": "smoke", "flow_id": flow, "work_pool_name": "luffy", "tags": ["old"]}
    made = api.ask("POST", "deployments/", deployment).raise_for_status().json()["id"]
    run = (
        api.ask("POST", f"deployments/{made}/create_flow_run", {"name": "old running"}).raise_for_status().json()["id"]
    )
    state = {"state": {"type": "RUNNING", "name": "Running"}, "force": True}
    api.ask("POST", f"flow_runs/{run}/set_state", state).raise_for_status()


def seen(api: ApiClient) -> dict[str, object]:
    """What the UI shows of the old runs."""
    runs = {run["name"]: run["state_type"] for run in api.rows("flow_runs") if run["name"].startswith("old")}
    logs = sum("a line of the log" in log["message"] for log in api.rows("logs"))
    return {
        "runs": runs,
        "log lines": logs,
        "artifacts": len(api.rows("artifacts")),
        "tasks": len(api.rows("task_runs")),
    }


def observe(what: str, is_so: bool) -> bool:
    print(f"{'ok ' if is_so else 'NOT'}  {what}", flush=True)
    return is_so


def story(python: Path, checkout: Checkout) -> list[bool]:
    """What was observed, in order."""
    home = checkout.workspace / "prefect"
    home.mkdir(parents=True)
    environment = {**checkout.environment, "PREFECT_HOME": str(home)}
    environment |= {"PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
    environment.pop("PYTHONPATH")
    with old_server(python, checkout, environment) as api:
        version = api.ask("GET", "admin/version").json()
        with messages_to(api, "lab"):  # the block alone is wanted: nothing is sent
            use(python, api, environment)
        before = seen(api)
    began = time.monotonic()
    server = checkout.start("--notify", NOTIFY)
    api = ApiClient(checkout.api)
    now, took_s = api.ask("GET", "admin/version").json(), time.monotonic() - began
    print(f"     Prefect {version} -> {now}, served after {took_s:.0f} s", flush=True)
    after, (new, _) = seen(api), checkout.submit(SHORT, "--watch")
    expected = {**before, "runs": {"old one": "COMPLETED", "old running": "CRASHED"}}
    found = [
        observe(f"the old runs, their logs and artifacts are there: {after}", after == expected),
        observe("a new run of a deployment completes", new.returncode == 0),
        observe(f"automations: {len(api.rows('automations'))}", len(api.rows("automations")) == 5),
    ]
    copies = [path.name for path in home.glob("prefect.db.before-*")]
    is_sqlite = URL not in checkout.environment
    found.append(observe(f"copies of the old database: {copies}", len(copies) == int(is_sqlite)))
    server.send_signal(signal.SIGINT)
    found.append(observe("the server ends in order", server.wait(PATIENCE_S) == 0))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="Python of the environment with the older Prefect")
    parser.add_argument("--postgresql", action="store_true", help="over PostgreSQL instead of SQLite")
    parser.add_argument("--folder", type=Path, help="keep checkout, workspace and logs in this new folder")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        checkout = Checkout(folder)
        if options.postgresql:
            checkout.environment[URL] = stack.enter_context(postgresql("a-password"))
        return 0 if all(story(options.old, checkout)) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`luffy serve` in a folder of its own, with a copy of the checkout, and other terminals in that copy."""

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import httpx
import psutil
from campaigns.random_kills import processes_of
from flow_process import in_terminal
from support.patience import PATIENCE_S, ran, wait_until
from support.prefect_api import place_empty_database

from luffy.flows.prefect_api import free_port
from luffy.pipeline.lock import holder_of

ROOT = Path(__file__).parents[2]
HOLDING = Path(__file__).parent / "holding"
SHORT = ["stages=[prepare_data, base]", "base.steps=4"]
LONG = [
    "stages=[prepare_data, base]",
    "base.steps=100000",
    "base.optimizer.schedule={kind: constant}",
    "execution.checkpoint.base_every=2",
]
"""Its stage never ends: a run of it goes on where the last one was ended."""
LOOK_S = 0.5
"""Between two looks that the server has to answer: it takes as long as the run that is waited for."""
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def command_lines():
    """Those of all processes. Asked many times a second: psutil would take a core."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.add((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return found


class Checkout:
    """A copy of the checkout with a workspace, and terminals in it that know the server."""

    def __init__(self, root, *, has_sqlite=True):
        self.root, self.workspace, self.port = root / "checkout", root / "workspace", free_port()
        self.said = []
        if has_sqlite:
            place_empty_database(self.workspace / "prefect")
        for name in ("flows", "tasks", "luffy", "data", "exp_configs"):
            # With the byte code, which each process would make anew, but without what is only being written.
            writing = shutil.ignore_patterns("*.pyc.*")
            shutil.copytree(ROOT / name, self.root / name, symlinks=True, ignore=writing)
        shutil.copy(ROOT / "prefect.yaml", self.root)
        for name in ("home", "served"):
            (root / name).mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "LUFFY"))}
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.environment = {
            **inherited,
            "PREFECT_API_URL": self.api,
            "HOME": str(root / "home"),
            "PYTHONPATH": f"{self.root}:{HOLDING}",
            "TEST_PACE": "base:100000:0.5",  # a stage of LONG is there to be ended, and would take a core
            "COLUMNS": "250",
        }

    def start(self, *options):
        """The server, once it has said all."""
        where = ["--port", str(self.port), "--workspace", self.workspace]
        command = [sys.executable, self.root / "flows/serve.py", *where, *options]
        env = {**self.environment, "PYTHONUNBUFFERED": "1"}
        process = in_terminal(command, cwd=self.root.with_name("served"), env=env)
        self.said = []
        for line in process.stdout:
            self.said.append(line)
            if line.startswith("Ctrl-C ends"):
                return process
        raise AssertionError("".join(self.said))

    def run(self, *arguments, **more):
        return ran([sys.executable, *arguments], cwd=self.root, env={**self.environment, **more})

    def begin(self, overrides, **more):
        """Start the deployment as the page of the server does; returns the run's identifier."""
        deployment = self.ask("deployments/name/full-pipeline/smoke")["id"]
        path = f"deployments/{deployment}/create_flow_run"
        return self.ask(path, parameters={"overrides": overrides}, **more)["id"]

    def deploy(self, name, parameters, *options):
        """Start a deployment by Prefect's command; returns the finished command."""
        given = [word for key, value in parameters.items() for word in ("-p", f"{key}={json.dumps(value)}")]
        return self.run("-m", "prefect", "deployment", "run", name, *given, *options)

    def ask(self, path, **body):
        """As Prefect's client asks: a server whose SQLite database was locked (503) is asked again."""
        method, url = "POST" if body else "GET", f"{self.api}/{path}"
        while True:
            answer = httpx.request(method, url, json=body or None, timeout=PATIENCE_S)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return answer.raise_for_status().json()
            time.sleep(LOOK_S)

    def state(self, run):
        return self.ask(f"flow_runs/{run}")["state_type"]

    def end_of(self, run):
        """The state in which `run` ends."""
        wait_until(lambda: self.state(run) in ENDED, f"the end of {run}", every_s=LOOK_S)
        return self.state(run)

    def wait_until_cancelled(self, run):
        """Prefect calls an interrupted run crashed, until the run itself has told it better."""
        wait_until(lambda: self.state(run) == "CANCELLED", f"the cancellation of {run}", every_s=LOOK_S)

    def cancel(self, run):
        """Request it as the page of the server does."""
        answer = self.ask(f"flow_runs/{run}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})
        assert answer["status"] == "ACCEPT"

    def artifacts(self, run):
        """What the run shows, the oldest first; Prefect's own record of its result has no type."""
        found = self.ask("artifacts/filter", artifacts={"flow_run_id": {"any_": [run]}}, sort="CREATED_DESC")
        return [artifact for artifact in reversed(found) if artifact["type"] is not None]

    def logs(self, run):
        return self.ask("logs/filter", logs={"flow_run_id": {"any_": [run]}}, limit=200)

    def processes(self, *words):
        """Live ones of this checkout's workspace whose commands have these words."""
        found = []
        for process in processes_of(self.workspace):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process] if all(word in " ".join(process.cmdline()) for word in words) else []
        return found

    def task_states(self, run):
        """The last state of each task of a run, by name."""
        found = self.ask("task_runs/filter", task_runs={"flow_run_id": {"any_": [run]}})
        return {task["name"]: task["state_name"] for task in found}

    def action_of_base(self):
        """What the newest run did for its stage `base`."""
        newest = max(self.workspace.glob("runs/*/run.json"), key=lambda path: path.stat().st_mtime)
        return json.loads(newest.read_text())["stages"]["base"]["action"]

    def wait_for_steps(self):
        """Until a stage `base` is at work and has a checkpoint."""
        steps = "stages/base/*/checkpoints/step_*/COMPLETE"
        wait_until(lambda: any(holder_of(step.parents[2]) for step in self.workspace.glob(steps)), every_s=LOOK_S)

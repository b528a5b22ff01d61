"""Prefect on this machine in one command: server with UI, work pool, worker, and the deployments of prefect.yaml.

    luffy serve                                        (or: make serve, python flows/serve.py)

It prints the commands with which any other terminal runs a deployment; runs work in the folder where the server was
started. Everything is kept under the workspace and bound to the loopback address, unless `--host` names another one,
which requires a password. Ctrl-C or `kill -9` of this process ends everything; a stage that was running resumes when
its run is started again.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("serve")

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import httpx

from luffy.cli.console import say, show_error
from luffy.config.shipped import SHIPPED
from luffy.errors import EXIT_FAILURE, EXIT_OK, LuffyError, UserError, first_line
from luffy.files import write_atomic
from luffy.flows.own_pages import NAMES_VARIABLE
from luffy.flows.prefect_api import (
    NO_TELEMETRY,
    SERVER_FILE,
    SERVING_FOLDER,
    ApiServer,
    ServerAddress,
    answers,
    guard,
    is_loopback,
    set_environment,
)
from luffy.pipeline.gpus import detected_gpus
from luffy.pipeline.lock import stage_lock
from luffy.pipeline.workspace import WORKSPACE_VARIABLE, Workspace
from luffy.processes import end_processes, start_marked, watch_parent

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_DEPLOYMENTS = (SHIPPED / "prefect.yaml").resolve()
POOL = "luffy"
_ENVIRONMENT = {
    "PREFECT_SERVER_UI_API_URL": "/api",  # under whatever name the browser has for this machine
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "PREFECT_WORKER_CANCELLATION_POLL_SECONDS": "10",  # where no event arrives
}
_PREFECT = [sys.executable, "-m", "prefect"]
_CLOSED = "the server that ran it was ended; start the run again, and its stages resume"
_REQUEST_TIMEOUT_S = 300.0
"""Long, since the server is on this machine: on one that trains it may wait minutes for a core."""
_GRACE_S = 35.0
"""Time that runs under way have when the server ends: the default of `execution.grace_s`, and their clean-up."""
_POLL_S = 0.5


def serve_until_interrupted(workspace: Workspace, address: ServerAddress, limit: int, *, end_with_parent: bool) -> int:
    """Serve until Ctrl-C; returns the exit code, raises LuffyError."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if end_with_parent:
        watch_parent(os.getppid(), lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        _serve(workspace, address, limit)
    except KeyboardInterrupt:
        say("ended")
    except httpx.HTTPError as error:
        what = f"the Prefect server does not answer as it should ({first_line(error)})"
        show_error(f"{what}; the machine may be overloaded, try again")
        return EXIT_FAILURE
    return EXIT_OK


def _serve(workspace: Workspace, address: ServerAddress, limit: int) -> None:
    guard(address.host)
    if answers(address.url, timeout_s=2.0):
        raise UserError(
            f"--port {address.port}: a Prefect server answers there already; end it, or give another --port"
        )
    refuse_taken(address.host, address.port)
    workspace.prepare()
    home = workspace.prefect_home
    os.environ.update({**_ENVIRONMENT, "PREFECT_HOME": str(home), WORKSPACE_VARIABLE: str(workspace.root)})
    os.environ.update({"PREFECT_API_URL": address.url, "PREFECT_SERVER_API_HOST": address.host})
    names = (*address.names, socket.gethostname(), socket.getfqdn(), address.host)
    os.environ[NAMES_VARIABLE] = ",".join(names)
    set_environment(home, debug=True)
    with ExitStack() as stack:
        stack.enter_context(_the_only_one(workspace))
        (home / SERVER_FILE).unlink(missing_ok=True)  # of one that was killed
        say(f"workspace {workspace.root}: starting Prefect's server")
        server = ApiServer(home, address.port, address.host)
        stack.callback(server.stop)
        server.wait()
        from prefect.client.orchestration import get_client  # late: the environment has to be set before
        from prefect.client.schemas.actions import WorkPoolCreate
        from prefect.exceptions import ObjectAlreadyExists
        from prefect.settings import PREFECT_SERVER_API_AUTH_STRING
        from prefect.workers.process import ProcessWorker

        client = stack.enter_context(get_client(sync_client=True, httpx_settings={"timeout": _REQUEST_TIMEOUT_S}))
        dead = _open_runs(client)
        template = ProcessWorker.get_default_base_job_template()
        with suppress(ObjectAlreadyExists):  # here, since deployments need it before the worker would have made it
            client.create_work_pool(WorkPoolCreate(name=POOL, type=ProcessWorker.type, base_job_template=template))
        worker = stack.enter_context(_worker(client, limit, home / "worker.log"))
        command = [*_PREFECT, "--no-prompt", "deploy", "--all", "--prefect-file", str(_DEPLOYMENTS)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LuffyError(f"prefect deploy --all has failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        for deployment in client.read_deployments():
            module = (deployment.entrypoint or "").rpartition(".")[0]
            if module.startswith("luffy.flows.") and find_spec(module) is None:
                client.delete_deployment(deployment.id)  # of a flow that an earlier version had
        _close(client, dead & _open_runs(client))
        if PREFECT_SERVER_API_AUTH_STRING.value() is None:  # neither in the environment nor in a file of Prefect's
            write_atomic(home / SERVER_FILE, address.url)
            stack.callback((home / SERVER_FILE).unlink, missing_ok=True)  # before the worker gets its time to end
        _say(client, address, workspace)
        while worker.poll() is None and not server.has_ended():
            time.sleep(_POLL_S)
        name, log = ("server", server.log_path) if server.has_ended() else ("worker", home / "worker.log")
        raise LuffyError(f"the Prefect {name} has ended by itself; see {log}")


def refuse_taken(host: str, port: int) -> None:
    """Raise UserError where a server cannot listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server does: a port whose connections are just being closed is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            option = "--port" if is_loopback(host) else "--port or --host"
            raise UserError(f"--port {port}: {error.strerror}; give another {option}") from None


def _the_only_one(workspace: Workspace) -> AbstractContextManager[None]:
    """Lock of the process that serves the workspace: a second server would mark the first one's runs as crashed."""

    def refuse(holder: str) -> None:
        raise UserError(f"{workspace.root}: is served already, by {holder}; end that, or give another --workspace")

    directory = workspace.prefect_home / SERVING_FOLDER
    directory.mkdir(parents=True, exist_ok=True)
    return stage_lock(directory, refuse)


@contextmanager
def _worker(client: "SyncPrefectClient", limit: int, log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The worker; at its end no run of it is left."""
    command = [*_PREFECT, "worker", "start", "--pool", POOL, "--type", "process", "--limit", str(limit)]
    with log_path.open("ab") as log:
        # In a session of its own: a Ctrl-C is for this process, which ends things in order.
        process, mark = start_marked(command, log, os.environ, sent=signal.SIGKILL)
    try:
        yield process
    finally:
        end_processes(mark, _GRACE_S)
        process.wait()
        _close(client, _open_runs(client))


def _open_runs(client: "SyncPrefectClient") -> set[UUID]:
    """Runs of the pool that have begun and not ended, without those on other hosts, which go on without a server.

    While no worker on this host serves the pool, no process works on them. Empty where the server does not answer.
    """
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter

    begun = FlowRunFilter.model_validate({"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}})
    pool = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}})
    try:
        found = client.read_flow_runs(flow_run_filter=begun, work_pool_filter=pool)
    except httpx.HTTPError:
        return set()  # the server is gone; the next one looks for them when it starts
    own = f"host:{socket.gethostname()}"
    return {run.id for run in found if own in run.tags or not any(tag.startswith("host:") for tag in run.tags)}


def _close(client: "SyncPrefectClient", runs: set[UUID]) -> None:
    """End the runs as crashed (or cancelled)."""
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Cancelled, Crashed

    for run in runs:
        with suppress(ObjectNotFound, httpx.HTTPError):  # one that was deleted meanwhile
            state = client.read_flow_run(run).state
            end = Cancelled if state is not None and state.is_cancelling() else Crashed
            client.set_flow_run_state(run, end(message=_CLOSED), force=True)


def _say(client: "SyncPrefectClient", address: ServerAddress, workspace: Workspace) -> None:
    flows = {flow.id: flow.name for flow in client.read_flows()}
    names = sorted(f"{flows[deployment.flow_id]}/{deployment.name}" for deployment in client.read_deployments())
    say(f"Prefect UI:  {address.url.removesuffix('/api')}")
    if not is_loopback(address.host):
        say(f"listens at:  {address.host}, with a password; other terminals need PREFECT_API_AUTH_STRING")
    say(f"workspace:   {workspace.root}")
    say(f"GPUs:        {len(detected_gpus() or ()) or 'none'}")
    say("deployments, to run in any other terminal:")
    variables = " ".join(f"{name}={value}" for name, value in {"PREFECT_API_URL": address.url, **NO_TELEMETRY}.items())
    say(f"    export {variables}")
    for name in names:
        say(f"    {shlex.join(_PREFECT)} deployment run {name} --watch")
    say("Ctrl-C ends server, worker and runs.")

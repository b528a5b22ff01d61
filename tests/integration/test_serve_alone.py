"""`make serve` where it must not begin, or where its server is slow: one line each, and nothing left behind."""

import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from luffy.cli.main import main
from luffy.errors import EXIT_FAILURE, LuffyError, UserError
from luffy.flows import serve
from luffy.flows.alerts import Alerts
from luffy.flows.api_client import ApiClient
from luffy.flows.basic_auth import ServerAddress
from luffy.flows.prefect_session import free_port
from luffy.pipeline.workspace import Workspace
from luffy.pipeline.workspace.lock import StageLock

IDLE = [sys.executable, "-c", "import time; time.sleep(7200)"]


@pytest.fixture
def idle():
    process = subprocess.Popen(IDLE)
    yield process
    process.kill()
    process.wait()


class SlowApi(BaseHTTPRequestHandler):
    """Hangs up without an answer, then fails, then has the pool."""

    requests = 0

    def do_GET(self):
        type(self).requests += 1
        if self.requests == 1:
            return
        self.send_response({2: 503}.get(self.requests, 200))
        self.end_headers()

    def log_message(self, *arguments):
        pass


def test_a_port_where_another_program_listens_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: Address already in use; give another --port"):
            serve._refuse_if_taken(ServerAddress(port))
    serve._refuse_if_taken(ServerAddress(port))


def test_a_workspace_that_is_served_is_refused_with_the_name_of_the_holder(tmp_path):
    workspace = Workspace(tmp_path)
    with serve._the_only_one(workspace):
        with pytest.raises(UserError, match=r"is served already, by pid \d+ on .*; end that") as caught:
            serve._the_only_one(workspace).__enter__()
        assert "\n" not in str(caught.value)
    with serve._the_only_one(workspace):
        pass


def test_the_lock_is_taken_before_any_server_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "ApiServer", lambda *arguments: pytest.fail("a server was started"))
    monkeypatch.setattr(serve, "set_environment", lambda *arguments, **options: None)
    monkeypatch.setattr(serve.os, "environ", {})
    workspace = Workspace(tmp_path / "workspace")
    workspace.prepare()
    (workspace.prefect_home / "serving").mkdir(parents=True)
    with StageLock(workspace.prefect_home / "serving"), pytest.raises(UserError, match="is served already"):
        serve._serve(workspace, ServerAddress(free_port(2)), 1, Alerts())


def test_the_port_of_the_reports_is_taken_before_any_server_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "ApiServer", lambda *arguments: pytest.fail("a server was started"))
    monkeypatch.setattr(serve, "set_environment", lambda *arguments, **options: None)
    monkeypatch.setattr(serve.os, "environ", {})
    port = free_port(2)
    with socket.create_server(("127.0.0.1", port + 1)):
        words = rf"port {port + 1} \(for the reports, one above --port\): Address already in use; give another"
        with pytest.raises(UserError, match=words):
            serve._serve(Workspace(tmp_path / "workspace"), ServerAddress(port), 1, Alerts())


def test_ports_for_servers_are_not_those_of_connections():
    lowest_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first = free_port(3)
    assert first + 2 < lowest_of_connections
    for place in range(3):
        socket.create_server(("127.0.0.1", first + place)).close()


def test_the_pool_is_requested_again_from_a_slow_server(tmp_path, monkeypatch, idle):
    monkeypatch.setattr(serve, "_POLL_S", 0.01)
    monkeypatch.setattr(SlowApi, "requests", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowApi) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        serve._wait_for_pool(ApiClient(f"http://127.0.0.1:{server.server_port}/api"), idle, tmp_path / "worker.log")
        server.shutdown()
    assert SlowApi.requests == 3


def test_a_worker_that_has_ended_is_not_waited_for(tmp_path, idle):
    idle.kill()
    idle.wait()
    with pytest.raises(LuffyError, match=r"the Prefect worker has ended by itself; see .*worker\.log"):
        serve._wait_for_pool(ApiClient(f"http://127.0.0.1:{free_port()}/api"), idle, tmp_path / "worker.log")


@pytest.mark.parametrize(
    "error",
    [
        httpx.ReadTimeout("timed out"),
        httpx.ReadTimeout(""),
        httpx.HTTPStatusError("Server error '503'\nFor more", request=None, response=None),  # type: ignore[arg-type]
    ],
)
def test_an_api_that_fails_ends_it_in_one_line(monkeypatch, capsys, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(serve, "_serve", fail)
    monkeypatch.setattr(serve.signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["serve"]) == EXIT_FAILURE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "does not answer as it should" in said


@pytest.mark.parametrize("port", ["0", "65535", "-1", "x", "70000"])
def test_a_port_without_a_next_one_is_refused(port, capsys):
    assert main(["serve", f"--port={port}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: Invalid value for '--port'") and said.count("\n") == 1

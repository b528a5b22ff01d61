"""`make serve` where it must not begin, or where its server is slow: one line each, and nothing left behind."""

import socket
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import httpx
import pytest
from prefect.exceptions import ObjectNotFound
from support.refusals import refused

from luffy.cli.main import main
from luffy.errors import EXIT_FAILURE
from luffy.flows import serve
from luffy.flows.prefect_api import ServerAddress, free_port
from luffy.pipeline.lock import stage_lock
from luffy.pipeline.workspace import Workspace


def test_a_port_where_another_program_listens_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with refused(f"--port {port}"):
            serve.refuse_taken("127.0.0.1", port)
    serve.refuse_taken("127.0.0.1", port)
    # Ports for servers are not those of connections.
    lowest_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port()
    assert port < lowest_of_connections
    socket.create_server(("127.0.0.1", port)).close()


def test_the_lock_is_taken_before_any_server_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "ApiServer", lambda *arguments: pytest.fail("a server was started"))
    monkeypatch.setattr(serve, "set_environment", lambda *arguments, **options: None)
    monkeypatch.setattr(serve.os, "environ", {})
    workspace = Workspace(tmp_path / "workspace")
    workspace.prepare()
    (workspace.prefect_home / "serving").mkdir(parents=True)
    with stage_lock(workspace.prefect_home / "serving"), refused(str(workspace.root), "served already"):
        serve._serve(workspace, ServerAddress(free_port()), 1)


ODD, KNOWN, CANCELLED = (UUID(int=number) for number in range(3))


class ApiOfRuns:
    """Answers with `error` when it is asked for the run ODD."""

    def __init__(self, status):
        request = httpx.Request("GET", "http://localhost")
        answer = httpx.HTTPStatusError("no", request=request, response=httpx.Response(status, request=request))
        self.error = ObjectNotFound(answer) if status == httpx.codes.NOT_FOUND else answer
        self.closed = {}

    def read_flow_run(self, run):
        if run == ODD:
            raise self.error
        return SimpleNamespace(state=SimpleNamespace(is_cancelling=lambda: run == CANCELLED))

    def set_flow_run_state(self, run, state, *, force):
        self.closed[run] = state.type.value


def test_a_run_that_cannot_be_closed_keeps_no_other_from_it():
    for status in (404, 503):
        client = ApiOfRuns(status)
        serve._close(client, {ODD, KNOWN, CANCELLED})
        assert client.closed == {KNOWN: "CRASHED", CANCELLED: "CANCELLED"}


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


@pytest.mark.parametrize("port", ["0", "65536", "x"])
def test_a_port_that_does_not_exist_is_refused(port, capsys):
    assert main(["serve", f"--port={port}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: Invalid value for '--port'") and said.count("\n") == 1

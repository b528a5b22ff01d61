"""The API that a flow uses, its server, and stages as Prefect caches them: real flows over toy stages.

`test_chain_struck` shows that an embedded server dies with its flow.
"""

import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import httpx
import pytest
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.exceptions import ObjectNotFound
from support.patience import PATIENCE_S
from support.prefect_api import place_empty_database, shared_api
from support.refusals import refused
from synthetic.endpoint import Endpoint, Reply

from luffy.cli.main import main
from luffy.errors import EXIT_FAILURE, LostError
from luffy.flows import prefect_api as api_module
from luffy.flows import serve
from luffy.flows.launch import call_flow
from luffy.flows.prefect_api import ServerAddress, answers, configured_api, free_port, prefect_api, set_environment
from luffy.pipeline.lock import stage_lock
from luffy.pipeline.workspace import Workspace

DRIVER = Path(__file__).with_name("toy_flow.py")
CHAIN = "stages=[prepare_data, base, evaluate]"
NODES = ("prepare_data", "base", "evaluate_base")
RETRIED = ("execution.retries=1", "execution.retry_delay_s=0.1")


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path


def test_the_environment_wins_over_the_project_over_the_profile(project, monkeypatch):
    assert configured_api() is None
    profiles = 'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://profile/api"\n'
    (project / "home" / "profiles.toml").write_text(profiles)
    assert configured_api() == "http://profile/api"
    (project / "pyproject.toml").write_text('[tool.prefect.api]\nurl = "http://project/api"\n')
    assert configured_api() == "http://project/api"
    (project / "prefect.toml").write_text('[api]\nurl = "http://file/api"\n')
    assert configured_api() == "http://file/api"
    monkeypatch.setenv("PREFECT_API_URL", "http://environment/api")
    assert configured_api() == "http://environment/api"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("prefect.toml", '[logging]\nconfig_path = "own.yml"'),
        ("pyproject.toml", '[tool.prefect.logging]\nconfig_path = "own.yml"'),
        (".env", "prefect_logging_config_path=own.yml"),
    ],
)
def test_settings_of_prefects_in_a_folder_run_nothing_unless_the_environment_lets_them_count(project, file, text):
    (project / file).write_text(text)
    with refused(file, "LUFFY_PREFECT_FILES=1"):
        set_environment(project / "home", debug=False)


@pytest.mark.parametrize("holder", ["this machine", "another-host", "damaged", None])
def test_a_run_finds_the_server_of_its_workspace_while_it_is_served_on_this_machine(
    project, listener, monkeypatch, holder
):
    monkeypatch.setenv("PREFECT_API_URL", "")  # restored at the end
    home, url = project / "home", listener(200, b"true")
    (home / "serving").mkdir()
    (home / "server.url").write_text(url)  # stays after a kill
    monkeypatch.setattr(api_module, "ApiServer", lambda home: SimpleNamespace(url="embedded", stop=lambda: None))
    with stage_lock(home / "serving") if holder else nullcontext():
        if holder == "another-host":
            (home / "serving" / ".lock").write_text("pid 17 on another-host")
        if holder == "damaged":
            (home / "server.url").write_bytes(b"\xff\xfe")
        assert (prefect_api(home) is None) is (holder == "this machine")
    assert os.environ["PREFECT_API_URL"] == (url if holder == "this machine" else "embedded")


@pytest.fixture
def listener():
    """Begins to answer every request alike; returns the address of what would be the API."""
    servers = []

    def begin(status, body):
        servers.append(Endpoint(lambda path, asked: Reply(status, body), ("/api/health",)))
        return f"{servers[-1].url}/api"

    yield begin
    for server in servers:
        server.close()


ANSWERS = [
    (200, b"true", True),
    (200, b"true\n", True),
    (401, b"", True),
    (403, b"", True),
    (404, b"", False),
    (500, b"true", False),
    (200, b"<html>another program</html>", False),
    (200, b"", False),
]


def test_only_a_prefect_api_is_recognised_as_one(listener):
    found = [(status, body, answers(listener(status, body), timeout_s=PATIENCE_S)) for status, body, _ in ANSWERS]
    assert found == ANSWERS
    for nobody in ("", "nothing", "http://[::1/api", "http://127.0.0.1:9/api"):
        assert not answers(nobody, timeout_s=PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"220 mail.example ready\r\n")
            connection.close()

        threading.Thread(target=greet, daemon=True).start()
        assert not answers(f"http://127.0.0.1:{server.getsockname()[1]}/api", timeout_s=PATIENCE_S)


def test_requests_to_this_machine_bypass_the_proxy(listener, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(urllib.request, "_opener", None)  # of an earlier request, which knows no proxy
    assert answers(listener(200, b"true"), timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "intranet, localhost"}, "intranet,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "old", "no_proxy": "intranet"}, "intranet,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "*", "no_proxy": "*"}, "*"),
    ],
)
def test_prefect_itself_bypasses_the_proxy_for_this_machine(tmp_path, monkeypatch, before, after):
    monkeypatch.setattr(
        os, "environ", {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    )
    os.environ.update(before)
    set_environment(tmp_path, debug=False)
    assert (os.environ["NO_PROXY"], os.environ["no_proxy"]) == (after, after)


def status_error(status):
    request = httpx.Request("GET", "http://localhost")
    return httpx.HTTPStatusError("no\nFor more", request=request, response=httpx.Response(status, request=request))


@pytest.mark.slow
def test_an_embedded_server_takes_the_place_of_an_api_that_does_not_answer(project, monkeypatch, capsys):
    """Where other machines may write the workspace, it has a folder of its own."""
    place_empty_database(project / "home" / "embedded" / socket.gethostname())
    monkeypatch.setattr(api_module, "is_shared", lambda folder: True)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    server = prefect_api(project / "home")
    try:
        assert "no Prefect API at http://127.0.0.1:9/api" in capsys.readouterr().err
        assert os.environ["PREFECT_API_URL"] == server.url
        server.wait()
        assert prefect_api(project / "home") is None
        assert [path.parent.name for path in (project / "home").rglob("prefect.db")] == [socket.gethostname()]
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (httpx.ConnectError("refused"), r"no longer answers \(ConnectError\)"),
        *((status_error(status), f"answers {status}") for status in (503, 429, 408)),
        (ConcurrencySlotAcquisitionError("Unable to acquire slots"), "does not let a task begin .Unable"),
    ],
)
def test_a_server_that_dies_or_is_overloaded_under_the_flow_is_one_line(error, line):
    def flow():
        raise error

    with pytest.raises(LostError, match=line) as caught:
        call_flow(flow, {}, None)
    assert "\n" not in str(caught.value)


# `luffy serve` where it must not begin, or where its server is slow


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


@pytest.mark.parametrize("error", [ObjectNotFound(status_error(404)), status_error(503)], ids=["404", "503"])
def test_a_run_that_cannot_be_closed_keeps_no_other_from_it(error):
    closed, (odd, known, cancelled) = {}, (UUID(int=number) for number in range(3))

    def read_flow_run(run):
        if run == odd:
            raise error
        return SimpleNamespace(state=SimpleNamespace(is_cancelling=lambda: run == cancelled))

    client = SimpleNamespace(
        read_flow_run=read_flow_run,
        set_flow_run_state=lambda run, state, *, force: closed.update({run: state.type.value}),
    )
    serve._close(client, {odd, known, cancelled})
    assert closed == {known: "CRASHED", cancelled: "CANCELLED"}


@pytest.mark.parametrize("error", [httpx.ReadTimeout("timed out"), httpx.ReadTimeout(""), status_error(503)])
def test_an_api_that_fails_ends_it_in_one_line(monkeypatch, capsys, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(serve, "_serve", fail)
    monkeypatch.setattr(serve.signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["serve"]) == EXIT_FAILURE
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "does not answer as it should" in said


# What is `Cached`, what is made again, and what two runs do at once


def start(root, *overrides, force="", **environment):
    command = [sys.executable, str(DRIVER), str(root), force, CHAIN, *overrides]
    env = {**os.environ, **shared_api(), **environment}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    """Its output, and the last state of each task."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return out + err, dict(re.findall(r"^state (\w+): (\w+)", out, re.MULTILINE))


def cached_but(*made):
    return {node: "Completed" if node in made else "Cached" for node in NODES}


def place(root, stage, name):
    (directory,) = (root / "stages" / stage).iterdir()
    return directory / name


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A workspace that two flows at once have finished."""
    root = tmp_path_factory.mktemp("done")
    flows = [start(root, TOY_STEP_S="2") for _ in range(2)]
    (said, found), (also_said, also_found) = map(ended, flows)
    pids = "|".join(str(flow.pid) for flow in flows)
    assert re.search(f"waiting: pid ({pids}) on ", said + also_said)
    for node in NODES:
        assert sorted((found[node], also_found[node])) == ["Cached", "Completed"], node
    assert (said + also_said).count("started:") == len(NODES)
    return root


def test_two_flows_at_once_make_each_stage_once(done):
    """What the fixture asserts."""


@pytest.mark.slow
def test_what_is_missing_changed_or_forced_is_a_miss_and_the_rest_is_cached(done):
    """Where only the record is harmed, as by a kill before it, the task runs and finds the result whole."""
    place(done, "base", "metrics.jsonl").unlink()
    place(done, "evaluate", "record.json").unlink()
    said, found = ended(start(done))
    assert (found, said.count("started:")) == (cached_but("base", "evaluate_base"), 1)
    said, found = ended(start(done, force="base"))
    assert found == cached_but("base")
    assert re.findall(r"planned: (.*)", said) == ["reused", "run", "reused"]
    assert re.findall(r"progress: (.*)", said)[0] == "1/3"
    assert {path.name for path in (done / "runs" / "smoke-4" / "stages").iterdir()} == set(NODES)
    # A task that makes stages by tasks and fails keeps none of their locks and records, cached ones included, whose
    # locks Prefect would leave to the task around them.
    place(done, "base", "model/weights").write_text("damaged")
    said, _ = ended(start(done, TOY_NESTED="1"))
    assert said.count("planned: reused") == 2 + 3
    assert said.count("records: 3") == 2
    assert said.count("started:") == 1 and "waiting" not in said
    # A result that differs is a miss for what was made from it.
    record = place(done, "prepare_data", "record.json")
    record.write_bytes(record.read_bytes()[:40])
    place(done, "base", "manifest.json").unlink()
    said, found = ended(start(done, TOY_WEIGHTS="other"))
    assert (found, said.count("started:")) == (cached_but(*NODES), 2)
    assert ended(start(done, PREFECT_TASKS_REFRESH_CACHE="true"))[1] == cached_but(*NODES)


def test_a_stage_that_was_killed_or_lost_something_is_resumed_by_prefect(tmp_path):
    faults = {"TOY_FAULT": "lost", "TOY_FAULT_BASE": "killed"}
    said, _ = ended(start(tmp_path, "stages=[prepare_data, base]", *RETRIED, **faults))
    assert set(re.findall(r"state (\w+): Completed after 2", said)) == {"prepare_data", "base"}
    for why in ("was ended by SIGKILL", "failed with exit code 75: http://host:8000: no answer"):
        assert said.count(f"message: {why}; resuming in 0 s (1 of 1)\nplanned: resume from step 2") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "starts"), [("lost for good", 2), ("crash", 1)])
def test_retries_are_limited_and_exclude_what_is_not_temporary(tmp_path, fault, starts):
    flow = start(tmp_path, *RETRIED, TOY_FAULT=fault)
    said, _ = ended(flow)
    assert said.count("started:") == starts
    assert flow.returncode == 1
    assert [path.name for path in (tmp_path / "stages").iterdir()] == ["prepare_data"], "no record of an exception"

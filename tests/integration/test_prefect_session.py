"""The API that a flow uses: the configured one when it answers, else an embedded server.

`test_chain_struck` shows that the server dies with its flow.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import nullcontext
from types import SimpleNamespace

import httpx
import pytest
from support.patience import PATIENCE_S
from support.prefect_api import place_empty_database
from support.refusals import refused
from synthetic.endpoint import Endpoint, Reply

from luffy.errors import LuffyError
from luffy.flows import prefect_api as api_module
from luffy.flows.launch import call_flow
from luffy.flows.prefect_api import answers, configured_api, free_port, prefect_api, set_environment
from luffy.pipeline.lock import stage_lock


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


@pytest.mark.parametrize(
    ("status", "body", "there"),
    [
        (200, b"true", True),
        (200, b"true\n", True),
        (401, b"", True),
        (403, b"", True),
        (404, b"", False),
        (500, b"true", False),
        (200, b"<html>another program</html>", False),
        (200, b"", False),
    ],
)
def test_only_a_prefect_api_is_recognised_as_one(listener, status, body, there):
    assert answers(listener(status, body), timeout_s=PATIENCE_S) is there


def test_a_listener_that_speaks_no_http_is_no_api():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"220 mail.example ready\r\n")
            connection.close()

        threading.Thread(target=greet, daemon=True).start()
        assert not answers(f"http://127.0.0.1:{server.getsockname()[1]}/api", timeout_s=PATIENCE_S)


@pytest.mark.parametrize("url", ["", "nothing", "http://[::1/api", "http://127.0.0.1:9/api"])
def test_no_listener_is_no_api(url):
    assert not answers(url, timeout_s=PATIENCE_S)


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
def test_prefect_itself_bypasses_the_proxy_for_this_machine(tmp_path, before, after):
    script = (
        "import json, os, sys; from pathlib import Path; from luffy.flows.prefect_api import set_environment;"
        "set_environment(Path(sys.argv[1]), debug=False);"
        "print(json.dumps([os.environ['NO_PROXY'], os.environ['no_proxy']]))"
    )
    inherited = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    found = subprocess.run(command, env={**inherited, **before}, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == [after, after]


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


def test_a_server_that_dies_under_the_flow_is_one_line():
    def flow():
        raise httpx.ConnectError("refused")

    with pytest.raises(LuffyError, match=r"no longer answers \(ConnectError\)") as caught:
        call_flow(flow, {}, None)
    assert "\n" not in str(caught.value)

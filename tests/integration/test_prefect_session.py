"""The API that a flow uses: the configured one when it answers, else an embedded server that dies with its parent."""

import os
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest

from flows.prefect_session import configured_api, prefect_api

START = """
import sys, time
from pathlib import Path
from flows.prefect_session import ApiServer
server = ApiServer(Path(sys.argv[1]))
server.wait()
print(server.url, flush=True)
time.sleep(60)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path


def test_no_api_is_configured_by_default(project):
    assert configured_api() is None


def test_the_environment_wins_over_the_project_over_the_profile(project, monkeypatch):
    profiles = 'active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://profile/api"\n'
    (project / "home" / "profiles.toml").write_text(profiles)
    assert configured_api() == "http://profile/api"
    (project / "pyproject.toml").write_text('[tool.prefect.api]\nurl = "http://project/api"\n')
    assert configured_api() == "http://project/api"
    (project / "prefect.toml").write_text('[api]\nurl = "http://file/api"\n')
    assert configured_api() == "http://file/api"
    monkeypatch.setenv("PREFECT_API_URL", "http://environment/api")
    assert configured_api() == "http://environment/api"


@pytest.mark.slow
def test_an_embedded_server_takes_the_place_of_an_api_that_does_not_answer(project, monkeypatch, capsys):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    server = prefect_api()
    try:
        assert "no Prefect API at http://127.0.0.1:9/api" in capsys.readouterr().err
        assert os.environ["PREFECT_API_URL"] == server.url
        server.wait()
        assert prefect_api() is None
    finally:
        server.stop()


@pytest.mark.slow
def test_kill_9_of_the_flow_ends_the_embedded_server(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", START, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    url = parent.stdout.readline().strip()
    assert urllib.request.urlopen(f"{url}/health").status == 200
    (server,) = psutil.Process(parent.pid).children()
    parent.kill()
    deadline = time.monotonic() + 5
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)

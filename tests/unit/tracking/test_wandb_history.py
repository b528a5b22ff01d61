"""A run read back from wandb's public API, whose HTTP answers are made here: the service itself was never asked."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.patience import PATIENCE_S

from luffy.errors import ConfigError
from luffy.tracking.wandb_history import read_wandb

NAME = "smoke · luffy · rl · seed 7"
LINES = [
    {"_step": 0, "step": 1, "reward/mean": 0.1, "rollout/tokens": 9, "other": "text"},
    {"_step": 1, "step": 2, "reward/mean": 0.2, "actor/loss": None},
    {"_step": 2, "step": 2, "samples": {"_type": "table-file"}},
    {"_step": 3, "step": 2, "reward/mean": 0.75, "perf/step_s": 2},  # again, after a restart
]
RUN = {
    "id": "r", "name": "abc", "displayName": NAME, "state": "finished", "tags": [], "systemMetrics": "{}",
    "config": json.dumps({"rl": {"value": {"steps": 2}}}), "summaryMetrics": "{}", "historyLineCount": len(LINES),
    "historyKeys": {"lastStep": len(LINES) - 1, "keys": {}}, "user": {"name": "me", "username": "me"}, "projectId": "1",
    "createdAt": "2026-01-01T00:00:00", "heartbeatAt": "2026-01-01T00:00:00", "group": "smoke-1", "jobType": "rl",
    "history": [json.dumps(line) for line in LINES],
}  # fmt: skip


class Wandb(BaseHTTPRequestHandler):
    """Knows one run, in the project team/luffy."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer: dict = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            named = asked.get("variables") or {}
            is_known = (named.get("entity"), named.get("project")) == ("team", "luffy") and "abc" in named.values()
            viewer = {"id": "u", "entity": "team", "username": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
            answer = (
                {"viewer": viewer} if "viewer" in asked["query"] else {"project": {"run": RUN if is_known else None}}
            )
        content = json.dumps({"data": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def shown(tmp_path):
    """Runs `luffy show` with an address and a key of wandb."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Wandb)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url, key = f"http://127.0.0.1:{server.server_port}", "ab" * 20
    place = {"WANDB_BASE_URL": url, "WANDB_API_KEY": key, "HOME": str(tmp_path)}

    def show(*words):
        command = [sys.executable, "-m", "luffy", "show", *words]
        env = {**os.environ, **place}
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=env)

    yield show
    server.shutdown()


@pytest.mark.slow
def test_metrics_and_curves_of_a_remote_run_are_shown(shown, tmp_path):
    done = shown("wandb:team/luffy/abc", "--all", "--svg", str(tmp_path / "svg"))
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == f"{NAME}: finished, 2 steps" and 'rl {"steps": 2}' in lines
    assert {"reward/mean 0.75", "rollout/tokens 9", "perf/step_s 2", "actor/loss nan"} <= {*lines}
    (file,) = (tmp_path / "svg").iterdir()
    assert "Reward" in file.read_text() and f"written to {file}" in done.stdout
    missing = shown("wandb:team/luffy/xyz")
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1) and "check name and key" in missing.stderr


@pytest.mark.parametrize("text", ["wandb:", "wandb:luffy/abc", "wandb:a//b"])
def test_another_form_is_refused(text):
    with pytest.raises(ConfigError, match="is not of the form wandb:ENTITY/PROJECT/RUN"):
        read_wandb(text)

"""A run's policy with its card, and its way to a hub: here a server that keeps what a commit brings.

The hub itself was never asked.
"""

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from support.refusals import refused
from synthetic.finished_chain import write_chain

from luffy.cli.commands.export import write_card
from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.errors import DataError
from luffy.pipeline.records import RecordedStage, RunRecord


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    config, inputs = write_chain(tmp_path / "chain", num_problems=20, num_steps=4)
    stages = {
        "prepare_data" if name == "data" else name: RecordedStage(name, directory, "run", "")
        for name, directory in inputs.items()
    }
    return RunRecord(tmp_path, "finished", stages=stages, config=config.model_dump(mode="json"))


def test_a_card_has_data_method_accuracies_and_the_command(run: RunRecord, tmp_path: Path) -> None:
    write_card(run, "rl", tmp_path)
    text = (tmp_path / "README.md").read_text()
    known = yaml.safe_load(text.split("---\n")[1])
    assert (known["library_name"], known["tags"]) == ("transformers", ["luffy"])
    assert "The policy after the stage rl of arithmetic, which starts from a policy trained from scratch." in text
    assert "| suite | base | SFT | RL |" in text and "| longer, sampled 20 problems |" in text
    assert "### rl" in text and "-A rho / (rho + 0.1)" in text
    assert "| train | arithmetic |" in text and "luffy run experiment.yaml" in text
    assert load_experiment(tmp_path / "experiment.yaml") == run.configuration


def test_a_run_that_evaluates_nothing_has_no_card(run: RunRecord, tmp_path: Path) -> None:
    alone = replace(run, config={**run.config, "stages": ["prepare_data", "base", "sft", "rl"]})
    with refused("no stage evaluate", error=DataError):
        write_card(alone, "rl", tmp_path)


class Hub(BaseHTTPRequestHandler):
    """What the hub's client needs for a commit of small files."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
        answer: dict[str, object] = {}
        if self.path == "/api/repos/create":
            self.server.asked.append(json.loads(body))  # type: ignore[attr-defined]
            answer = {"url": f"{hub}/me/mine", "id": "me/mine"}
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.kept[line["value"]["path"]] = base64.b64decode(line["value"]["content"])  # type: ignore[attr-defined]
            answer = {"commitUrl": f"{hub}/me/mine/commit/0", "commitOid": "0" * 40}
        refused = self.headers["Authorization"] != "Bearer hf_right"
        content = json.dumps({"error": "this token may not write"} if refused else answer).encode()
        self.send_response(403 if refused else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.kept, server.asked = {}, []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    yield server
    server.shutdown()
    server.server_close()


def stage(folder: Path) -> Path:
    """A finished stage's directory, as far as an export reads it."""
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").touch()
    (folder / "manifest.json").touch()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(bytes(range(256)) * 9)
    return folder


@pytest.mark.parametrize("public", [False, True])
def test_the_folder_is_committed_to_the_hub_and_private_unless_public(hub, tmp_path, capsys, public: bool) -> None:
    folder, target = stage(tmp_path / "stage"), tmp_path / "out"
    arguments = ["export", str(folder), str(target), "--push-to-hub", "me/mine", *(["--public"] if public else [])]
    assert main(arguments) == 0
    assert hub.kept == {path.name: path.read_bytes() for path in target.iterdir()} and len(hub.kept) == 2
    (asked,) = hub.asked
    assert (asked["name"], asked["organization"]) == ("mine", "me")
    assert asked.get("private", asked.get("visibility") == "private") is not public
    assert f"uploaded to {constants.ENDPOINT}/me/mine" in capsys.readouterr().out


def test_a_token_that_may_not_write_is_one_line_and_the_policy_is_kept(hub, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    folder, target = stage(tmp_path / "stage"), tmp_path / "out"
    assert main(["export", str(folder), str(target), "--push-to-hub", "me/mine"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "hf_wrong" not in said
    assert f"the policy is in {target}: log in" in said and (target / "model.safetensors").is_file()

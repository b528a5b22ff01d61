"""wandb: offline without a key, and never the reason why a run dies."""

import json
import logging
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE_S

from luffy.config.execution import TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.tracking.tracker import Tracker, WandbRun, _mode, run_id


class FailingRun:
    """Starts, then refuses everything."""

    def __init__(self) -> None:
        self.calls = 0

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def log(self, _: object) -> None:
        self.calls += 1
        raise ConnectionError("no route to host")


def track(out: Path, mode: str) -> Tracker:
    return Tracker(out, "0123abcd", "rl", TrackingConfig(wandb=mode), GradingConfig())


def test_disabled_means_that_wandb_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    with track(tmp_path, "disabled") as tracker:
        tracker.log(1, {"actor/loss": 0.5})


def test_a_wandb_that_cannot_start_costs_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING), track(tmp_path, "offline") as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"actor/loss": 0.5})
    assert [record.message.split(":")[0] for record in caplog.records] == ["wandb is off for the rest of this run"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_wandb_that_fails_in_mid_run_is_asked_no_more(tmp_path, monkeypatch, caplog):
    failing = FailingRun()
    fake = SimpleNamespace(Settings=dict, init=lambda **_: failing)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = WandbRun(tmp_path, "key", "rl", TrackingConfig(wandb="offline"), {})
    for step in (1, 2, 3):
        run.log(step, {"actor/loss": 0.5})
    run.close()
    assert (failing.calls, len(caplog.records)) == (1, 1)


def test_the_run_id_survives_a_restart_and_suits_wandb() -> None:
    assert run_id("0123abcd") == run_id("0123abcd") == "0123abcd"
    assert run_id("a/b#c" * 40) == ("a-b-c" * 40)[:64]


@pytest.fixture
def keyless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a key; returns the file that could have one."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path.parent / "wandb_home"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("NETRC", str(folder / f"{tmp_path.name}.netrc"))
    return folder / f"{tmp_path.name}.netrc"


def test_online_without_a_key_is_offline_with_a_word_about_it(keyless, monkeypatch, caplog):
    online = TrackingConfig(wandb="online")
    assert _mode(online) == "offline"
    assert "no API key here" in caplog.text
    keyless.write_text("machine api.wandb.ai login user password 0123")
    assert _mode(online) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert _mode(online) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0123")
    assert _mode(online) == "online"
    assert _mode(TrackingConfig(wandb="offline")) == "offline"


DRIVER = """\
import os, signal, sys
from pathlib import Path
import psutil
from luffy.config.execution import TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.tracking.tracker import SampleRollout, Tracker

out, step, end = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with Tracker(out, "0123abcd", "rl", TrackingConfig(wandb="online"), GradingConfig(), resumed_from=step - 1) as tracker:
    tracker.log(step, {"actor/loss": 0.5, "reward/mean": 0.25})
    tracker.samples(step, [SampleRollout("u1", "1+1?", "2", "on_policy", 1.0, "correct", 0.5)])
    if end == "kill -9":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "lose wandb":
        for process in psutil.Process().children(recursive=True):
            process.kill()
            process.wait()
        for later in range(step + 1, step + 4):
            tracker.log(later, {"actor/loss": 0.5})
"""


def drive(out: Path, step: int, end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", DRIVER, str(out), str(step), end]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, stdin=subprocess.DEVNULL)


def records_of(path: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, or the last part
            yield Record.FromString(whole)
            whole = b""


def found(records: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


@pytest.mark.slow
def test_a_killed_run_goes_on_under_its_id_with_config_metrics_tables_and_a_reference(tmp_path, keyless):
    assert drive(tmp_path, 1, "kill -9").returncode == -9
    second = drive(tmp_path, 2, "")
    assert second.returncode == 0, second.stderr
    files = sorted(tmp_path.rglob("*.wandb"), key=lambda path: path.stat().st_mtime)
    assert [path.name for path in files] == ["run-0123abcd.wandb"] * 2
    first, last = (list(records_of(path)) for path in files)
    (started,) = found(last, "run")
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert (started.run_id, started.display_name, config["timeout_s"]) == ("0123abcd", "rl", 5.0)
    assert {metric.glob_name: metric.step_metric for metric in found(last, "metric")}["actor/*"] == "step"
    rows = [{"/".join([item.key, *item.nested_key]).strip("/"): json.loads(item.value_json) for item in history.item}
            for history in found(last, "history")]  # fmt: skip
    assert [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row] == [(2, 0.25)]
    assert [(row["step"], row["samples/nrows"]) for row in rows if "samples/nrows" in row] == [(2, 1)]
    (artifact,) = [artifact for artifact in found(last, "artifact") if artifact.type == "stage"]
    assert (artifact.name, json.loads(artifact.metadata)["directory"]) == ("rl-0123abcd", str(tmp_path))
    here = {entry.ref.removeprefix(f"{tmp_path.resolve().as_uri()}/") for entry in artifact.manifest.contents}
    assert here == {"metrics.jsonl", "samples.jsonl"}
    assert [artifact for artifact in found(first, "artifact") if artifact.type == "stage"] == []


@pytest.mark.slow
def test_a_wandb_whose_own_process_dies_costs_one_warning(tmp_path: Path, keyless: Path) -> None:
    done = drive(tmp_path, 1, "lose wandb")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wandb is off for the rest of this run") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4

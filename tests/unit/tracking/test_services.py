"""wandb, TensorBoard and MLflow: what they show of a run, and that none is ever the reason why it waits or dies."""

import json
import logging
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from support.patience import PATIENCE_S

from luffy.config.execution import TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.tracking import services
from luffy.tracking.services import TrackedRun, wandb_mode
from luffy.tracking.tracker import SampleRollout, Tracker


class FailingRun:
    """Starts, then refuses everything."""

    def __init__(self) -> None:
        self.calls = 0

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def log(self, _: object) -> None:
        self.calls += 1
        raise ConnectionError("no route to host")


LABELS = {"experiment": "smoke", "method": "luffy", "stage": "rl", "seed": "7", "run": "smoke-1"}
ROLLOUT = SampleRollout("u1", "1+1?", "2", "on_policy", 1.0, "correct", 0.5)


def track(out: Path, resumed_from: int = 0, **services: object) -> Tracker:
    return Tracker(out, "0123abcd", LABELS, TrackingConfig(**services), GradingConfig(), resumed_from)


NOTHING = """\
import sys
from luffy.config.execution import TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.tracking.tracker import Path, Tracker

Tracker(Path(sys.argv[1]), "key", {}, TrackingConfig(), GradingConfig()).log(1, {"actor/loss": 1.0})
sys.exit(str({"wandb", "mlflow", "tensorboard"} & {*sys.modules}))
"""


def test_what_is_not_configured_is_not_even_imported(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", NOTHING, str(tmp_path)], capture_output=True, text=True)
    assert done.stderr.strip() == "set()"


SERVICES = {
    "wandb": ("wandb", {"wandb": "offline"}),
    "tensorboard": ("torch.utils.tensorboard", {"tensorboard": "events"}),
    "mlflow": ("mlflow", {"mlflow": "sqlite:///runs.db"}),
}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_cannot_start_costs_one_warning(tmp_path, monkeypatch, caplog, name):
    module, configured = SERVICES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises
    with caplog.at_level(logging.WARNING), track(tmp_path, **configured) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"actor/loss": 0.5})
    assert [record.message.split(":")[0] for record in caplog.records] == [f"{name} is off for the rest of this run"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_wandb_that_fails_in_mid_run_is_asked_no_more(tmp_path, monkeypatch, caplog):
    failing = FailingRun()
    fake = SimpleNamespace(Settings=dict, init=lambda **_: failing)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with track(tmp_path, wandb="offline") as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"actor/loss": 0.5})
    assert (failing.calls, len(caplog.records)) == (1, 1)


@pytest.mark.parametrize("hanging", ["start", "log", "close"])
def test_a_service_that_hangs_costs_no_step(tmp_path, monkeypatch, caplog, hanging):
    """Its thread waits for an event that the test sets only after the tracker has closed."""
    released = threading.Event()

    class Hanging:
        def __init__(self, *_: object) -> None:
            self.act("start")

        def act(self, what: str) -> None:
            assert what != hanging or released.wait(PATIENCE_S)

        def log(self, *_: object) -> None:
            self.act("log")

        def close(self, *, failed: bool) -> None:
            self.act("close")

    monkeypatch.setattr(services, "_FINISH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(services, "_MOST_WAITING", 4)
    monkeypatch.setattr(services, "WandbService", Hanging)
    with track(tmp_path, wandb="offline") as tracker:
        for step in range(1, 9 if hanging != "close" else 2):
            tracker.log(step, {"actor/loss": 0.5})
    released.set()
    words = "it has not taken everything after 0.2 s" if hanging == "close" else "it is 4 calls behind"
    assert [record.message for record in caplog.records] == [f"wandb is off for the rest of this run: {words}"]


@pytest.mark.slow
def test_tensorboard_and_mlflow_show_a_killed_run_as_one(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    tracking = pytest.importorskip("mlflow.tracking", reason="needs mlflow-skinny")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/runs.db"
    for start, loss in ((0, 0.5), (1, 0.25)):  # the second goes on from the checkpoint of step 1
        tracker = track(tmp_path, start, tensorboard=str(tmp_path / "events"), mlflow=uri, tags=("paper",), note="try")
        for step in range(start + 1, 4):
            tracker.log(step, {"actor/loss": loss})
            tracker.samples(step, [ROLLOUT])
        for each in tracker._services if start == 0 else ():  # killed: nothing is closed
            each.call(None)
            each._thread.join()
    tracker.close()
    (folder,) = (tmp_path / "events").iterdir()
    assert folder.name == "smoke_luffy_rl_seed 7-0123abcd"
    shown = EventAccumulator(str(folder)).Reload()
    assert [(event.step, event.value) for event in shown.Scalars("actor/loss")] == [(1, 0.5), (2, 0.25), (3, 0.25)]
    assert "samples/0/text_summary" in shown.Tags()["tensors"]
    client = tracking.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("smoke").experiment_id])
    assert (run.info.run_name, run.info.status) == ("smoke · luffy · rl · seed 7", "FINISHED")
    assert (run.data.tags["luffy.tags"], run.data.tags["mlflow.note.content"]) == ("paper", "try\n")
    assert run.data.tags["luffy.run"] == "smoke-1" and run.data.params["timeout_s"] == "5.0"
    last = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "actor/loss")}
    assert last == {1: 0.5, 2: 0.25, 3: 0.25}
    assert {file.path for file in client.list_artifacts(run.info.run_id, "samples")} >= {"samples/step_000003.json"}


def test_a_password_in_an_address_is_refused():
    with pytest.raises(ValidationError, match="export MLFLOW_TRACKING_PASSWORD instead"):
        TrackingConfig(mlflow="https://me:secret@mlflow.example.org")


def test_the_id_survives_a_restart_and_suits_wandb() -> None:
    assert TrackedRun("a/b#c" * 40, {}, Path(), {}).id == ("a-b-c" * 40)[:64]


def test_notes_lead_to_the_report_and_to_every_stage() -> None:
    stages = {"sft": ("reused", "key1"), "rl": ("run", "key2")}
    run = TrackedRun("k", LABELS, Path(), {}, report="file:///w/report.html", stages=stages)
    assert run.name == "smoke · luffy · rl · seed 7" and "experiment:smoke" in run.tags
    assert run.notes().splitlines() == ["report: file:///w/report.html", "- sft: reused, key1", "- rl: run, key2"]
    assert (
        run.notes("https://wandb.ai/e/p/runs/").splitlines()[1]
        == "- sft: reused, [key1](https://wandb.ai/e/p/runs/key1)"
    )


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
    assert wandb_mode(online) == "offline"
    assert "no API key here" in caplog.text
    keyless.write_text("machine api.wandb.ai login user password 0123")
    assert wandb_mode(online) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode(online) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0123")
    assert wandb_mode(online) == "online"
    assert wandb_mode(TrackingConfig(wandb="offline")) == "offline"


DRIVER = """\
import os, signal, sys, time
from pathlib import Path
import psutil
from luffy.config.execution import TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.tracking.tracker import SampleRollout, Tracker

out, step, end = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
LABELS = {"experiment": "smoke", "method": "luffy", "stage": "rl", "seed": "7", "run": "smoke-1"}
with Tracker(out, "0123abcd", LABELS, TrackingConfig(wandb="online"), GradingConfig(), step - 1) as tracker:
    tracker.log(step, {"actor/loss": 0.5, "reward/mean": 0.25})
    tracker.samples(step, [SampleRollout("u1", "1+1?", "2", "on_policy", 1.0, "correct", 0.5)])
    while end and not (any(out.rglob("*.wandb")) and not tracker._services[0]._calls.qsize()):
        time.sleep(0.05)
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
    assert (started.run_id, started.display_name, config["timeout_s"]) == (
        "0123abcd",
        "smoke · luffy · rl · seed 7",
        5.0,
    )
    assert (started.run_group, started.job_type, started.tags[0]) == ("smoke-1", "rl", "experiment:smoke")
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

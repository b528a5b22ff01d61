"""wandb and TensorBoard: what they show of a run, and that none is ever the reason why it waits or dies."""

import json
import logging
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.patience import PATIENCE_S, ran

from luffy.config.execution import TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.tracking import services
from luffy.tracking.services import TrackedRun, wandb_mode
from luffy.tracking.tracker import SampleRollout, Tracker

LABELS = {"experiment": "smoke", "method": "luffy", "stage": "rl", "seed": "7", "run": "smoke-1"}
NAME = "smoke · luffy · rl · seed 7"
ROLLOUT = SampleRollout("u1", "1+1?", "2", "on_policy", 1.0, "correct", 0.5)
OFFLINE = {"wandb": "offline"}


def track(out: Path, resumed_from: int = 0, **services: object) -> Tracker:
    return Tracker(out, "0123abcd", LABELS, TrackingConfig(**services), GradingConfig(), resumed_from)


NOTHING = """\
import sys
from luffy.config.execution import TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.tracking.tracker import Path, Tracker

Tracker(Path(sys.argv[1]), "key", {}, TrackingConfig(), GradingConfig()).log(1, {"actor/loss": 1.0})
sys.exit(str({"wandb", "tensorboard"} & {*sys.modules}))
"""


def test_what_is_not_configured_is_not_even_imported(tmp_path: Path) -> None:
    assert ran([sys.executable, "-c", NOTHING, tmp_path]).stderr.strip() == "set()"


# Faults: each costs one warning, and no step.


def missing(module: str):
    return lambda monkeypatch, _: monkeypatch.setitem(sys.modules, module, None)  # importing it raises


def refusing(monkeypatch: pytest.MonkeyPatch, _: threading.Event) -> None:
    """wandb starts, and raises at the first metrics."""
    asked: list[object] = []

    def log(metrics: object) -> None:
        assert not asked, "it is asked no more"
        asked.append(metrics)
        raise ConnectionError("no route to host")

    run = SimpleNamespace(define_metric=lambda *_, **__: None, log=log)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=dict, init=lambda **_: run))


def hanging(at: str, *, fails: bool = False):
    """wandb whose call `at` waits for an event, which the test sets after the tracker has closed, and fails then."""

    def arrange(monkeypatch: pytest.MonkeyPatch, released: threading.Event) -> None:
        def act(what: str) -> None:
            assert what != at or (released.wait(PATIENCE_S) and not fails)

        class Hanging:
            def __init__(self, *_: object) -> None:
                act("start")

            def log(self, *_: object) -> None:
                act("log")

            def close(self, *, failed: bool) -> None:
                act("close")

        monkeypatch.setattr(services, "_FINISH_TIMEOUT_S", 0.2)
        monkeypatch.setattr(services, "_MOST_WAITING", 4)
        monkeypatch.setattr(services, "WandbService", Hanging)

    return arrange


BEHIND, LATE = "it is 4 calls behind", "it has not taken everything after 0.2 s"
FAULTS = {
    "wandb is missing": (missing("wandb"), OFFLINE, 3, ""),
    "tensorboard is missing": (missing("torch.utils.tensorboard"), {"tensorboard": "events"}, 3, ""),
    "wandb fails in mid-run": (refusing, OFFLINE, 3, "ConnectionError: no route to host"),
    "the start hangs": (hanging("start"), OFFLINE, 8, BEHIND),
    "the start hangs and fails at last": (hanging("start", fails=True), OFFLINE, 8, BEHIND),
    "a step hangs": (hanging("log"), OFFLINE, 8, BEHIND),
    "the end hangs": (hanging("close"), OFFLINE, 1, LATE),
}


@pytest.mark.parametrize(("arrange", "configured", "num_steps", "why"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_service_costs_one_warning(
    tmp_path, monkeypatch, caplog, arrange, configured, num_steps, why
) -> None:
    monkeypatch.chdir(tmp_path)
    released = threading.Event()
    arrange(monkeypatch, released)
    with caplog.at_level(logging.WARNING), track(tmp_path, **configured) as tracker:
        for step in range(1, num_steps + 1):
            tracker.log(step, {"actor/loss": 0.5})
    released.set()
    for each in tracker._services:
        each._thread.join(PATIENCE_S)
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith(f"{next(iter(configured))} is off for the rest of this run: ") and why in warning
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == num_steps


def test_a_run_is_named_by_its_labels_and_its_notes_lead_to_the_report_and_to_every_stage() -> None:
    stages = {"sft": ("reused", "key1"), "rl": ("run", "key2")}
    run = TrackedRun("a/b#c" * 40, LABELS, Path(), {}, report="file:///w/report.html", stages=stages)
    assert run.id == ("a-b-c" * 40)[:64]
    assert run.name == NAME and "experiment:smoke" in run.tags
    assert run.notes().splitlines() == ["report: file:///w/report.html", "- sft: reused, key1", "- rl: run, key2"]
    assert "- sft: reused, [key1](https://wandb.ai/e/p/runs/key1)\n" in run.notes("https://wandb.ai/e/p/runs/")


@pytest.fixture
def keyless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a key; returns the file that could have one."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path.parent / f"{tmp_path.name}.netrc"
    monkeypatch.setenv("NETRC", str(file))
    return file


def test_online_without_a_key_is_offline_with_a_word_about_it(keyless, monkeypatch, caplog) -> None:
    online = TrackingConfig(wandb="online")
    assert wandb_mode(online) == "offline" and "no API key here" in caplog.text
    keyless.write_text("machine api.wandb.ai login user password 0123")
    assert wandb_mode(online) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode(online) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "0123")
    assert (wandb_mode(online), wandb_mode(TrackingConfig(wandb="offline"))) == ("online", "offline")


# What is shown, by the services themselves.


@pytest.mark.slow
def test_tensorboard_shows_a_killed_run_as_one(tmp_path, monkeypatch) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    for start, loss in ((0, 0.5), (1, 0.25)):  # the second goes on from the checkpoint of step 1
        tracker = track(tmp_path, start, tensorboard=str(tmp_path / "events"), tags=("paper",), note="try")
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
def test_a_killed_run_goes_on_under_its_id_with_config_metrics_tables_and_a_reference(tmp_path, keyless) -> None:
    assert ran([sys.executable, "-c", DRIVER, tmp_path, 1, "kill -9"]).returncode == -9
    second = ran([sys.executable, "-c", DRIVER, tmp_path, 2, ""])
    assert second.returncode == 0, second.stderr
    files = sorted(tmp_path.rglob("*.wandb"), key=lambda path: path.stat().st_mtime)
    assert [path.name for path in files] == ["run-0123abcd.wandb"] * 2
    first, last = (list(records_of(path)) for path in files)
    (started,) = found(last, "run")
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert (started.run_id, started.display_name, config["timeout_s"]) == ("0123abcd", NAME, 5.0)
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
    done = ran([sys.executable, "-c", DRIVER, tmp_path, 1, "lose wandb"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wandb is off for the rest of this run") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4

"""wandb: offline without a key, and never the reason why a run dies."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from luffy.config.execution import TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.tracking.tracker import Tracker
from luffy.tracking.wandb_run import WandbRun, run_id


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


def test_a_wandb_that_cannot_start_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING), track(tmp_path, "offline") as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"actor/loss": 0.5})
    assert [record.message.split(":")[0] for record in caplog.records] == ["wandb is off for the rest of this run"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_wandb_that_fails_in_mid_run_is_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = FailingRun()
    fake = SimpleNamespace(Settings=dict, init=lambda **_: failing)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = WandbRun(tmp_path, "key", "rl", TrackingConfig(wandb="online"), {})
    for step in (1, 2, 3):
        run.log(step, {"actor/loss": 0.5})
    run.close()
    assert (failing.calls, len(caplog.records)) == (1, 1)


def test_the_run_id_survives_a_restart_and_suits_wandb() -> None:
    assert run_id("0123abcd") == run_id("0123abcd") == "0123abcd"
    assert run_id("a/b#c" * 40) == ("a-b-c" * 40)[:64]


@pytest.mark.slow
def test_offline_runs_without_a_key_and_continue_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for step in (1, 2):
        with track(tmp_path, "offline") as tracker:
            tracker.log(step, {"actor/loss": 0.5})
    records = sorted(path.name for path in tmp_path.rglob("*.wandb"))
    assert records == ["run-0123abcd.wandb"] * 2
    assert caplog.records == []

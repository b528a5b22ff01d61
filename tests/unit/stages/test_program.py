"""What all stage programs share: what an attempt leaves to the next one, and which code a stage refuses."""

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.http_client import Answer, HTTPClient, RequestLimits
from luffy.pipeline.events import EVENTS_FILE, EventReader, EventWriter
from luffy.pipeline.experiment import Experiment, open_experiment
from luffy.pipeline.job import JOB_FILE, read_job, write_job
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest, write_manifest
from luffy.pipeline.reuse import newest_checkpoint
from luffy.pipeline.workspace import Workspace
from luffy.stages import program
from luffy.stages.program import StageContext, StageResult, run_program

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"
PLANNED = {"luffy.data.schema": "1" * 16, "luffy.types": "2" * 16}
EDITED = {**PLANNED, "luffy.data.schema": "f" * 16}


@pytest.fixture
def experiment(tmp_path, monkeypatch) -> Experiment:
    """An experiment whose first stage is ready to start."""
    monkeypatch.setattr(program, "receive_stop_requests", lambda: None)  # pytest keeps its own signal handlers
    opened = open_experiment(load_experiment(SMOKE), Workspace(tmp_path), code=lambda rooms: PLANNED)
    plan = opened.plan_node("prepare_data")
    plan.directory.mkdir(parents=True)
    write_job(plan.directory / JOB_FILE, opened.job(plan))
    return opened


def attempt(
    experiment: Experiment,
    monkeypatch: pytest.MonkeyPatch,
    code: dict[str, str],
    *,
    killed: bool = False,
    lasting_s: float = 0.0,
) -> list[int]:
    """Start the stage with this code; returns the step that it resumed from, empty if it did not run."""
    resumed: list[int] = []

    def run(settings: object, context: StageContext) -> StageResult:
        newest = newest_checkpoint(context.out)
        resumed.append(newest[0] if newest else 0)
        checkpoint = context.out / "checkpoints" / f"step_{resumed[0] + 1:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMPLETE").touch()
        EventWriter(context.out / EVENTS_FILE, clock=lambda: time.time() + lasting_s).message("at work")
        if killed:
            raise KeyboardInterrupt
        (context.out / "rows").touch()
        return StageResult(("rows",), {})

    monkeypatch.setattr(program, "code_identity", lambda rooms: code)
    out = experiment.plan_node("prepare_data").directory
    run_program("prepare_data", run, ["--config", str(out / JOB_FILE), "--out", str(out)])
    return resumed


def test_code_that_was_edited_since_the_plan_is_refused_before_it_touches_anything(experiment, monkeypatch, capsys):
    assert attempt(experiment, monkeypatch, PLANNED, killed=True) == [0]
    assert attempt(experiment, monkeypatch, EDITED) == []
    said = capsys.readouterr().err
    assert "code edited since the run began (luffy.data.schema)" in said and "the same command plans it again" in said
    assert attempt(experiment, monkeypatch, PLANNED) == [1]


def test_what_a_stage_waits_for_long_is_told_to_the_terminal(experiment, monkeypatch):
    def run(settings: object, context: StageContext) -> StageResult:
        client = HTTPClient("http://host", None, RequestLimits(1.0, 1.0))
        asyncio.run(client.pause(0, Answer(429, {"error": "slow down"}, "300")))
        return StageResult((), {})

    async def sleep(seconds: float) -> None: ...

    monkeypatch.setattr("luffy.http_client.asyncio.sleep", sleep)
    monkeypatch.setattr(program, "code_identity", lambda rooms: PLANNED)
    out = experiment.plan_node("prepare_data").directory
    for _ in range(2):  # the second attempt tells it once, too
        (out / EVENTS_FILE).unlink(missing_ok=True)
        run_program("prepare_data", run, ["--config", str(out / JOB_FILE), "--out", str(out)])
        (out / MANIFEST_FILE).unlink()
    told = [event.text for event in EventReader(out / EVENTS_FILE).read() if event.kind == "message"]
    assert len(told) == 1 and told[0].startswith("http://host: status 429: slow down (Retry-After: 300); asking again")


def test_a_longer_run_that_is_killed_and_resumed_still_says_which_run_it_continues(experiment, monkeypatch):
    plan = experiment.plan_node("prepare_data")
    shorter = plan.directory.with_name("shorter")
    shorter.mkdir()
    assert attempt(experiment, monkeypatch, PLANNED) == [0]
    finished = read_manifest(plan.directory)
    assert finished is not None and finished.extended is None
    write_manifest(shorter, finished.model_copy(update={"key": "shorter"}))
    shutil.rmtree(plan.directory)
    plan.directory.mkdir()
    write_job(plan.directory / JOB_FILE, experiment.job(plan).model_copy(update={"extends": str(shorter)}))
    assert attempt(experiment, monkeypatch, PLANNED, killed=True) == [0]
    shutil.rmtree(shorter)
    assert attempt(experiment, monkeypatch, PLANNED) == [1]
    manifest = read_manifest(plan.directory)
    assert manifest is not None and manifest.extended == "shorter"


def test_the_time_of_earlier_attempts_counts_and_of_cleared_work_does_not(experiment, monkeypatch):
    out = experiment.plan_node("prepare_data").directory
    assert attempt(experiment, monkeypatch, PLANNED, killed=True, lasting_s=5000.0) == [0]
    job = read_job(out / JOB_FILE)
    write_job(out / JOB_FILE, job.model_copy(update={"afresh": True}))
    assert attempt(experiment, monkeypatch, PLANNED, killed=True, lasting_s=1000.0) == [0]
    write_job(out / JOB_FILE, job)
    assert attempt(experiment, monkeypatch, PLANNED, killed=True, lasting_s=200.0) == [1]
    assert attempt(experiment, monkeypatch, PLANNED) == [2]
    manifest = read_manifest(out)
    assert manifest is not None and 1200.0 <= manifest.earlier_s < 5000.0
    assert manifest.total_s == manifest.attempt_s + manifest.earlier_s


def test_a_shorter_run_that_was_deleted_since_the_plan_is_not_continued(experiment, monkeypatch):
    plan = experiment.plan_node("prepare_data")
    job = experiment.job(plan).model_copy(update={"extends": str(plan.directory.with_name("deleted"))})
    write_job(plan.directory / JOB_FILE, job)
    assert attempt(experiment, monkeypatch, PLANNED) == [0]
    manifest = read_manifest(plan.directory)
    assert manifest is not None and manifest.extended is None

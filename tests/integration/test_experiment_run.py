"""Chains of toy stages in one workspace: reuse, damage, early cutoff, two runs at once."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S
from toy_run import Recorder, toy_run

from luffy.errors import StageFailed
from luffy.pipeline.job import JOB_FILE, write_job

DRIVER = Path(__file__).with_name("toy_run.py")
NODES = ("prepare_data", "base", "evaluate_base")


def execute(root, nodes=NODES, *overrides):
    """What was decided for each node."""
    run, decisions = toy_run(root, *overrides), {}
    for name in nodes:
        recorder = Recorder()
        run.execute(name, recorder)
        decisions[name] = recorder.texts("planned")[0]
    return decisions


@pytest.fixture(scope="module")
def done_once(tmp_path_factory):
    """A workspace in which all are finished. Not to be changed."""
    root = tmp_path_factory.mktemp("done")
    assert set(execute(root).values()) == {"run"}
    return root


@pytest.fixture
def done(done_once, tmp_path):
    """A copy of it."""
    return shutil.copytree(done_once, tmp_path / "done", symlinks=True)


def output(root, stage, name):
    (directory,) = (root / "stages" / stage).iterdir()
    return directory / name


@pytest.mark.slow
def test_a_second_run_reuses_everything_and_links_to_it(done):
    assert set(execute(done).values()) == {"reused"}
    record = json.loads((done / "runs" / "toy-2" / "run.json").read_text())
    assert list(record["stages"]) == list(NODES)
    assert (done / "runs" / "toy-2" / "stages" / "base" / "manifest.json").exists()


@pytest.mark.slow
def test_a_damaged_output_runs_its_stage_alone_when_the_result_is_the_same(done):
    output(done, "base", "metrics.jsonl").write_text("damaged")
    assert execute(done) == {"prepare_data": "reused", "base": "run", "evaluate_base": "reused"}
    assert set(execute(done).values()) == {"reused"}


@pytest.mark.slow
def test_dependants_of_a_damaged_output_run_when_the_result_differs(done, monkeypatch):
    output(done, "base", "metrics.jsonl").unlink()
    monkeypatch.setenv("TOY_WEIGHTS", "other")
    assert execute(done) == {"prepare_data": "reused", "base": "run", "evaluate_base": "run"}
    assert set(execute(done).values()) == {"reused"}


@pytest.mark.slow
def test_a_damaged_model_is_exported_again_from_its_last_checkpoint(done):
    output(done, "base", "model/weights").write_text("damaged")
    assert execute(done) == {"prepare_data": "reused", "base": "resume from step 3", "evaluate_base": "reused"}


@pytest.mark.slow
def test_a_longer_run_gets_its_own_directory(tmp_path):
    nodes = ("prepare_data", "base", "sft", "rl")
    execute(tmp_path, nodes, "rl.steps=3")
    before = output(tmp_path, "rl", "manifest.json").read_bytes()
    decisions = execute(tmp_path, nodes, "rl.steps=5")
    assert re.fullmatch(r"continue [0-9a-f]{16} from step 3", decisions["rl"])
    found = {path.read_bytes() for path in (tmp_path / "stages" / "rl").glob("*/manifest.json")}
    assert len(found) == 2
    assert before in found


@pytest.mark.slow
def test_another_run_of_the_stage_does_not_change_the_execution_settings_of_the_one_at_work(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_FAULT", "killed")
    run, other = (toy_run(tmp_path, f"execution.num_threads={threads}") for threads in (1, 2))
    with pytest.raises(StageFailed) as caught:
        run.execute("prepare_data", Recorder())
    assert caught.value.temporary
    plan = other.experiment.plan_node("prepare_data")

    class Meddling(Recorder):
        def planned(self, plan):
            write_job(plan.directory / JOB_FILE, other.experiment.job(plan))

    write_job(plan.directory / JOB_FILE, other.experiment.job(plan))
    manifest = run.execute("prepare_data", Meddling())
    assert (manifest.resumed_from, manifest.execution.num_threads) == (2, 1)


@pytest.mark.slow
def test_the_second_of_two_concurrent_runs_waits_and_reuses(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_STEP_S", "1.5")
    command = [sys.executable, str(DRIVER), str(tmp_path), "prepare_data"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    (worker,) = (text for text in outputs if "started:" in text)
    (waiter,) = (text for text in outputs if "started:" not in text)
    pid = json.loads(output(tmp_path, "prepare_data", "metrics.jsonl").read_text())["pid"]
    assert f"waiting: pid {pid} on " in waiter
    assert "finished: reused" in waiter
    digests = [re.search(r"done: (\w+)", text)[1] for text in (worker, waiter)]
    assert digests[0] == digests[1]

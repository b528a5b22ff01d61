"""Chains of toy stages in one workspace, without Prefect; `test_prefect_cache` has reuse, damage, two runs at once."""

import re
from pathlib import Path

import pytest
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


def output(root, stage, name):
    (directory,) = (root / "stages" / stage).iterdir()
    return directory / name


@pytest.mark.slow
def test_a_damaged_model_is_exported_again_from_its_last_checkpoint(tmp_path):
    assert set(execute(tmp_path).values()) == {"run"}
    output(tmp_path, "base", "model/weights").write_text("damaged")
    assert execute(tmp_path) == {"prepare_data": "reused", "base": "resume from step 3", "evaluate_base": "reused"}


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

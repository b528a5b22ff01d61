"""Stages as Prefect caches them: what is `Cached`, what is made again, and what two runs do at once.

Real flows against a real server, over toy stages.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S, wait_until
from prefect_api import shared_api

pytestmark = pytest.mark.slow
DRIVER = Path(__file__).with_name("toy_flow.py")
CHAIN = "stages=[prepare_data, base, evaluate]"
NODES = ("prepare_data", "base", "evaluate_base")
RETRIED = ("execution.retries=1", "execution.retry_delay_s=0.1")


def start(root, *overrides, force="", **environment):
    command = [sys.executable, str(DRIVER), str(root), force, CHAIN, *overrides]
    env = {**os.environ, **shared_api(), **environment}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process):
    """Its output, and the last state of each task."""
    out, err = process.communicate(timeout=PATIENCE_S)
    return out + err, dict(re.findall(r"^state (\w+): (\w+)", out, re.MULTILINE))


def states(root, *overrides, **options):
    return ended(start(root, *overrides, **options))[1]


def cached_but(*made):
    return {node: "Completed" if node in made else "Cached" for node in NODES}


def place(root, stage, name=""):
    (directory,) = (path for path in (root / "stages" / stage).iterdir())
    return directory / name


@pytest.fixture(scope="module")
def done_once(tmp_path_factory):
    """A workspace in which all are finished. Not to be changed."""
    root = tmp_path_factory.mktemp("done")
    assert states(root) == cached_but(*NODES)
    return root


@pytest.fixture
def done(done_once, tmp_path):
    """A copy of it, in another place."""
    return shutil.copytree(done_once, tmp_path / "done", symlinks=True)


def damaged(path):
    path.write_text("damaged")


def torn(path):
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    "harmed",
    [
        {("base", "metrics.jsonl"): Path.unlink, ("evaluate", "record.json"): Path.unlink},
        {("base", "model/weights"): damaged, ("evaluate", "record.json"): torn},
        {("base", "manifest.json"): Path.unlink},
    ],
)
def test_what_is_missing_or_changed_is_a_miss(done, harmed):
    """Where only the record is harmed, as by a kill before it, the task runs and finds the result whole."""
    for (stage, name), harm in harmed.items():
        harm(place(done, stage, name))
    said, found = ended(start(done))
    assert found == cached_but(*({"evaluate": "evaluate_base"}.get(stage, stage) for stage, _ in harmed))
    assert said.count("started:") == 1
    said, found = ended(start(done))
    assert found == cached_but()
    assert re.findall(r"planned: (.*)", said) == ["reused"] * 3
    assert {path.name for path in (done / "runs" / "smoke-3" / "stages").iterdir()} == set(NODES)


def test_a_result_that_differs_is_a_miss_for_what_was_made_from_it(done):
    place(done, "base", "model/weights").unlink()
    assert states(done, TOY_WEIGHTS="other") == cached_but("base", "evaluate_base")


def test_a_forced_stage_begins_again_and_the_rest_is_cached(done):
    said, found = ended(start(done, force="base"))
    assert found == cached_but("base")
    assert re.findall(r"planned: (.*)", said) == ["reused", "run", "reused"]
    assert re.findall(r"progress: (.*)", said)[0] == "1/3"
    assert states(done, PREFECT_TASKS_REFRESH_CACHE="true") == cached_but(*NODES)


def test_after_kill_9_of_the_flow_the_same_command_resumes_and_repeats_nothing(tmp_path):
    flow = start(tmp_path, TOY_HANGS_AT="3")
    pattern = "stages/prepare_data/*/checkpoints/step_000002/COMPLETE"
    wait_until(lambda: any(tmp_path.glob(pattern)), "the second step")
    os.kill(flow.pid, signal.SIGKILL)
    flow.communicate(timeout=PATIENCE_S)
    said, found = ended(start(tmp_path))
    assert found == cached_but(*NODES)
    assert "planned: resume from step 2" in said


def test_two_flows_make_each_stage_once_and_the_one_that_waits_sees_it_cached(tmp_path):
    flows = [start(tmp_path, TOY_STEP_S="2") for _ in range(2)]
    (said, found), (also_said, also_found) = map(ended, flows)
    pids = "|".join(str(flow.pid) for flow in flows)
    assert re.search(f"waiting: pid ({pids}) on ", said + also_said)
    for node in NODES:
        assert sorted((found[node], also_found[node])) == ["Cached", "Completed"], node
    assert (said + also_said).count("started:") == len(NODES)


def test_a_task_that_makes_stages_by_tasks_and_fails_keeps_none_of_their_locks_and_records(done):
    """Cached ones included, whose locks Prefect would leave to the task around them."""
    place(done, "evaluate", "manifest.json").unlink()
    said, _ = ended(start(done, TOY_NESTED="1"))
    assert said.count("planned: reused") == 2 + 3
    assert said.count("records: 3") == 2
    assert "waiting" not in said


@pytest.mark.parametrize(
    ("fault", "why"),
    [("killed", "was ended by SIGKILL"), ("lost", "failed with exit code 75: http://host:8000: no answer")],
)
def test_a_stage_that_was_killed_or_lost_something_is_resumed_by_prefect(tmp_path, fault, why):
    said, _ = ended(start(tmp_path, "stages=[prepare_data, base]", *RETRIED, TOY_FAULT=fault))
    assert set(re.findall(r"state (\w+): Completed after 2", said)) == {"prepare_data", "base"}
    assert said.count(f"message: {why}; resuming in 0 s (1 of 1)\nplanned: resume from step 2") == 2


@pytest.mark.parametrize(("fault", "mode", "starts"), [("lost for good", "", 2), ("crash", "", 1), ("", "mistake", 1)])
def test_retries_are_limited_and_exclude_crashes_and_mistakes(tmp_path, fault, mode, starts):
    flow = start(tmp_path, *RETRIED, TOY_FAULT=fault, TOY_MODE=mode)
    said, _ = ended(flow)
    assert said.count("started:") == starts
    assert flow.returncode == 1
    assert [path.name for path in (tmp_path / "stages").iterdir()] == ["prepare_data"], "no record of an exception"

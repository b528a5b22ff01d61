"""Stages as Prefect caches them: what is `Cached`, what is made again, and what two runs do at once.

Real flows against a real server, over toy stages.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from support.prefect_api import shared_api

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


def tear(path):
    path.write_bytes(path.read_bytes()[:40])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A workspace that two flows at once have finished."""
    root = tmp_path_factory.mktemp("done")
    flows = [start(root, TOY_STEP_S="2") for _ in range(2)]
    (said, found), (also_said, also_found) = map(ended, flows)
    pids = "|".join(str(flow.pid) for flow in flows)
    assert re.search(f"waiting: pid ({pids}) on ", said + also_said)
    for node in NODES:
        assert sorted((found[node], also_found[node])) == ["Cached", "Completed"], node
    assert (said + also_said).count("started:") == len(NODES)
    return root


def test_what_is_missing_changed_or_forced_is_a_miss_and_the_rest_is_cached(done):
    """Where only the record is harmed, as by a kill before it, the task runs and finds the result whole."""
    place(done, "base", "metrics.jsonl").unlink()
    place(done, "evaluate", "record.json").unlink()
    said, found = ended(start(done))
    assert (found, said.count("started:")) == (cached_but("base", "evaluate_base"), 1)
    said, found = ended(start(done, force="base"))
    assert found == cached_but("base")
    assert re.findall(r"planned: (.*)", said) == ["reused", "run", "reused"]
    assert re.findall(r"progress: (.*)", said)[0] == "1/3"
    assert {path.name for path in (done / "runs" / "smoke-4" / "stages").iterdir()} == set(NODES)
    # A task that makes stages by tasks and fails keeps none of their locks and records, cached ones included, whose
    # locks Prefect would leave to the task around them.
    place(done, "base", "model/weights").write_text("damaged")
    said, _ = ended(start(done, TOY_NESTED="1"))
    assert said.count("planned: reused") == 2 + 3
    assert said.count("records: 3") == 2
    assert said.count("started:") == 1 and "waiting" not in said
    # A result that differs is a miss for what was made from it.
    tear(place(done, "prepare_data", "record.json"))
    place(done, "base", "manifest.json").unlink()
    said, found = ended(start(done, TOY_WEIGHTS="other"))
    assert (found, said.count("started:")) == (cached_but(*NODES), 2)
    assert states(done, PREFECT_TASKS_REFRESH_CACHE="true") == cached_but(*NODES)


def test_a_stage_that_was_killed_or_lost_something_is_resumed_by_prefect(tmp_path):
    faults = {"TOY_FAULT": "lost", "TOY_FAULT_BASE": "killed"}
    said, _ = ended(start(tmp_path, "stages=[prepare_data, base]", *RETRIED, **faults))
    assert set(re.findall(r"state (\w+): Completed after 2", said)) == {"prepare_data", "base"}
    for why in ("was ended by SIGKILL", "failed with exit code 75: http://host:8000: no answer"):
        assert said.count(f"message: {why}; resuming in 0 s (1 of 1)\nplanned: resume from step 2") == 1


@pytest.mark.parametrize(("fault", "mode", "starts"), [("lost for good", "", 2), ("crash", "", 1), ("", "mistake", 1)])
def test_retries_are_limited_and_exclude_crashes_and_mistakes(tmp_path, fault, mode, starts):
    flow = start(tmp_path, *RETRIED, TOY_FAULT=fault, TOY_MODE=mode)
    said, _ = ended(flow)
    assert said.count("started:") == starts
    assert flow.returncode == 1
    assert [path.name for path in (tmp_path / "stages").iterdir()] == ["prepare_data"], "no record of an exception"

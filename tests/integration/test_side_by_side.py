"""Stages of one run at the same time, in a real flow: an evaluation beside training, and Ctrl-C for both."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flow_process import processes_of
from patience import PATIENCE_S
from prefect_api import shared_api, without_prefect

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_ctrl_c_ends_the_stages_that_run_side_by_side(undisturbed, tmp_path):
    """After those that come before them, which are reused."""
    workspace = shutil.copytree(undisturbed[0], tmp_path / "workspace", symlinks=True)
    env = without_prefect() | shared_api() | {"PYTHONUNBUFFERED": "1", "LUFFY_WORKSPACE": str(workspace)}
    longer = ("execution.parallel_stages=2", "sft.epochs=5000", "evaluation.max_response_tokens=64")
    flow = subprocess.Popen(
        [sys.executable, "flows/full_pipeline.py", "exp_configs/smoke.yaml", *longer],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    begun = set()
    for line in flow.stdout:
        begun |= set(re.findall(r" (sft|evaluate_base): run", line))
        if begun == {"sft", "evaluate_base"}:
            break
    flow.send_signal(signal.SIGINT)
    _, err = flow.communicate(timeout=PATIENCE_S)
    assert flow.returncode == 130, err
    assert "interrupted; the same command resumes" in err
    assert processes_of(workspace) == []
    record = json.loads((workspace / "runs/smoke-2/run.json").read_text())
    assert record["state"] == "interrupted"
    assert list(record["stages"]) == ["prepare_data", "base", "sft", "evaluate_base"]

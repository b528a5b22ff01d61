"""What several files of this folder start from."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S
from sandboxed import processes_below

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """A workspace after one run of smoke.yaml with an embedded server, and that run. Not to be changed: copy it."""
    workspace = tmp_path_factory.mktemp("finished")
    command = [sys.executable, "flows/full_pipeline.py", "exp_configs/smoke.yaml"]
    env = {**os.environ, "LUFFY_WORKSPACE": str(workspace), "PYTHONUNBUFFERED": "1"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert result.returncode == 0, result.stderr
    return workspace, result


@pytest.fixture
def started_here():
    """A function that returns what this test has started and that lives, without what earlier tests have left."""
    earlier = set(psutil.Process().children(recursive=True))
    return lambda: [process for process in processes_below(os.getpid()) if process not in earlier]

"""A small experiment whose stages are finished by hand."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.stages import CONFIGS

from luffy.config import load_experiment
from luffy.pipeline.experiment import Experiment, open_experiment
from luffy.pipeline.workspace import Workspace

SMOKE = CONFIGS / "smoke.yaml"
HOLD = """
import sys, time
from pathlib import Path
from luffy.pipeline.lock import stage_lock

with stage_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(7200)
"""


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def opened(workspace) -> Callable[..., Experiment]:
    """An experiment on smoke.yaml with overrides; `code` stands in for the fingerprints."""

    def open_it(*overrides: str, code: dict[str, str] | None = None, verify: bool = False) -> Experiment:
        config = load_experiment(SMOKE, overrides)
        return open_experiment(config, workspace, verify=verify, code=lambda rooms: code or {"module": "1"})

    return open_it


@pytest.fixture
def hold() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts a process that holds the lock of a directory until it is killed."""
    with ExitStack() as ended:

        def start(directory: Path) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", HOLD, str(directory)]
            process = ended.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            ended.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == "locked\n"
            return process

        yield start

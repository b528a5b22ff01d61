"""A small experiment whose stages are finished by hand."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from support.stages import CONFIGS

from luffy.config import load_experiment
from luffy.pipeline.experiment import Experiment, open_experiment
from luffy.pipeline.workspace import Workspace

SMOKE = CONFIGS / "smoke.yaml"


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def opened(workspace) -> Callable[..., Experiment]:
    """An experiment on smoke.yaml with overrides; `code` stands in for the fingerprints."""

    def open_it(*overrides: str, code: dict[str, str] | None = None, verify: bool = False) -> Experiment:
        config = load_experiment(SMOKE, overrides)
        return open_experiment(config, workspace, verify=verify, code=lambda kind, rooms: code or {"module": "1"})

    return open_it


HELD = """
import os, socket, sys
from contextlib import nullcontext
from pathlib import Path
from luffy.pipeline import gpus, lock, workspace
place = Path(sys.argv[1])
with {} as held:
    print(held, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holding() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts a process that holds something at a `place` until its input ends or it is killed: it, and what it got."""
    with ExitStack() as ended:

        def start(what, place, command=(sys.executable,), **options):
            words = [*command, "-c", HELD.format(what), str(place)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            process = ended.enter_context(subprocess.Popen(words, **pipes, **options))
            ended.callback(process.kill)
            line = process.stdout.readline().strip()
            assert line
            return process, line

        yield start

"""What several files of this folder start from."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from filelock import FileLock
from flow_process import UNDISTURBED
from support.patience import ran
from support.prefect_api import place_empty_database
from support.sandboxed import processes_below

from luffy.pipeline import warm_start
from luffy.pipeline.warm_start import WarmServer, can_start_warm

ROOT = Path(__file__).parents[2]


def _shared(factory: pytest.TempPathFactory) -> Path:
    """A folder of the test session, the same for all processes of pytest-xdist."""
    folder = factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def surroundings(tmp_path_factory):
    """vLLM inspects an architecture in a process of its own, for as long as a small stage takes: once for all tests.

    Warm servers start stages although pytest has named another test or phase, and torch its default, since they began.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "VLLM_CACHE_ROOT" not in os.environ:
            patch.setenv("VLLM_CACHE_ROOT", str(_shared(tmp_path_factory) / "vllm"))
        changing = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
        patch.setattr(warm_start, "_OWN_VARIABLES", warm_start._OWN_VARIABLES | changing)
        yield


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """A workspace after one run of `UNDISTURBED` with an embedded server, and that run. Not to be changed: copy it.

    The processes of a test session share one. Its RL stage has the checkpoints of steps 2, 4 and 6.
    """
    shared = _shared(tmp_path_factory)
    workspace, record = shared / "undisturbed", shared / "undisturbed.json"
    command = [sys.executable, "flows/full_pipeline.py", *UNDISTURBED]
    with FileLock(shared / "undisturbed.lock"):
        if not record.exists():
            place_empty_database(workspace / "prefect")
            env = {**os.environ, "LUFFY_WORKSPACE": str(workspace), "PYTHONUNBUFFERED": "1"}
            result = ran(command, cwd=ROOT, env=env)
            record.write_text(json.dumps([result.returncode, result.stdout, result.stderr]))
    result = subprocess.CompletedProcess(command, *json.loads(record.read_text()))
    assert result.returncode == 0, result.stderr
    return workspace, result


@pytest.fixture(scope="module")
def warm_stages(tmp_path_factory):
    """Stages that a module's tests start without a flow are forked from a warm server, as a flow's are."""
    server = WarmServer(tmp_path_factory.mktemp("warm") / "server.log") if can_start_warm() else None
    with server.use() if server else nullcontext():
        yield


@pytest.fixture
def started_here():
    """A function that returns what this test has started and that lives, without what earlier tests have left."""
    earlier = set(psutil.Process().children(recursive=True))
    return lambda: [process for process in processes_below(os.getpid()) if process not in earlier]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A function `made(name, make)`: the folder that `make(folder)` has filled, once for all processes of the session.

    Not to be changed.
    """

    def folder_of(name, make):
        folder = _shared(tmp_path_factory) / "made" / name
        folder.parent.mkdir(exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                make(folder.with_name(f"{name}.unfinished"))
                folder.with_name(f"{name}.unfinished").rename(folder)
        return folder

    return folder_of

"""The RL stage under `cluster: ray` as a real program: whatever is killed, it ends with one reason, leaves no process,
and the same command resumes it.

The tests are one story of one stage, in order: each goes on where the one before was ended.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from patience import PATIENCE_S, wait_until, wait_until_ended

from luffy.errors import EXIT_TEMPORARY
from luffy.pipeline.chain.checkpoints import complete_checkpoints

pytestmark = pytest.mark.slow
DRIVER = Path(__file__).with_name("ray_run.py")
TWO_RANKS = "execution.ray={trainer_ranks: 2, start_timeout_s: 600, call_timeout_s: 600}"
ONE_RANK = "execution.ray={trainer_ranks: 1, start_timeout_s: 600, call_timeout_s: 600}"
NUM_STEPS = 30
GRACE = f"execution.grace_s={PATIENCE_S}"

started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Also behind a test that failed."""
    yield
    for driver in started:
        driver.kill()  # its stage ends with it
        driver.wait()
    started.clear()


def start(workspace: Path, nodes: str, layout: str) -> subprocess.Popen[str]:
    with (workspace / "driver.txt").open("w") as out:
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), str(workspace), nodes, layout, f"rl.steps={NUM_STEPS}", GRACE],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            # As in a terminal: a shell that runs this in the background has its children ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    started.append(driver)
    return driver


def said(workspace: Path) -> str:
    return (workspace / "driver.txt").read_text()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = tmp_path_factory.mktemp("workspace")
    assert start(workspace, "prepare_data,base", TWO_RANKS).wait(timeout=PATIENCE_S) == 0, said(workspace)
    return workspace


def stage(workspace: Path) -> Path:
    (directory,) = (workspace / "stages" / "rl").iterdir()
    return directory


def steps(workspace: Path) -> list[int]:
    """Those whose metrics are written."""
    files = list((workspace / "stages").glob("rl/*/metrics.jsonl"))
    return [json.loads(line)["step"] for file in files for line in file.read_text().splitlines()]


def processes(driver: subprocess.Popen[str], name: str = "") -> list[psutil.Process]:
    """All that the driver has started, of that name."""
    found = []
    if driver.poll() is not None:
        return []
    for process in psutil.Process(driver.pid).children(recursive=True):
        try:
            found += [process] if name in process.name() else []
        except psutil.NoSuchProcess:
            continue
    return found


def writes(process: psutil.Process, log: str) -> bool:
    return Path(f"/proc/{process.pid}/fd/1").resolve().name == log


def until_step(workspace: Path, driver: subprocess.Popen[str], step: int) -> None:
    """Until this start of the stage has written the metrics of `step`, or of a later one."""

    def is_there() -> bool:
        told = re.findall(rf"^progress: (\d+)/{NUM_STEPS}$", said(workspace), re.MULTILINE)
        return driver.poll() is not None or max(map(int, told), default=0) >= step

    wait_until(is_there)
    assert driver.poll() is None, said(workspace)


def test_a_killed_rank_ends_the_stage_and_is_named(workspace: Path) -> None:
    driver = start(workspace, "rl", TWO_RANKS)
    until_step(workspace, driver, 3)
    everybody = processes(driver)
    (victim,) = (process for process in processes(driver, "ray::RankActor") if writes(process, "rank_1.log"))
    victim.kill()
    assert driver.wait(timeout=PATIENCE_S) == 1
    assert re.search(
        r"^error: rl failed with exit code 75: trainer rank 1 died; the same command resumes",
        said(workspace),
        re.M,
    )
    wait_until_ended(everybody)


def test_the_loss_of_rays_head_ends_the_stage(workspace: Path) -> None:
    resumed = max(complete_checkpoints(stage(workspace)))
    driver = start(workspace, "rl", ONE_RANK)
    until_step(workspace, driver, resumed + 1)
    assert f"started: from step {resumed}\n" in said(workspace)
    everybody = processes(driver)
    (engine,) = processes(driver, "ray::EngineActor")
    (head,) = processes(driver, "gcs_server")
    # Who has nothing to ask of the head goes on without it: toy steps would all be done before it is missed. A stopped
    # engine is one with long answers.
    engine.suspend()
    head.kill()
    assert driver.wait(timeout=PATIENCE_S) == 1
    assert re.search(
        r"^error: rl failed with exit code 75: Ray's head at \S+ is gone; the same command",
        said(workspace),
        re.M,
    )
    wait_until_ended(everybody)


def test_sigterm_to_every_process_of_the_stage_ends_it_with_a_checkpoint_of_its_step(workspace: Path) -> None:
    """Ranks, engines and Ray's daemons get it with the stage, as from a scheduler."""
    resumed = max(complete_checkpoints(stage(workspace)))
    driver = start(workspace, "rl", ONE_RANK)
    until_step(workspace, driver, resumed + 1)
    everybody = processes(driver)
    for process in everybody:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    assert driver.wait(timeout=PATIENCE_S) == EXIT_TEMPORARY, said(workspace)
    step = max(complete_checkpoints(stage(workspace)))
    assert step > resumed
    assert f"error: rl was asked to end: step {step} of {NUM_STEPS} is saved; the same" in said(workspace)
    wait_until_ended(everybody)


@pytest.mark.parametrize(
    ("victim", "signal_sent", "code"),
    [("stage", signal.SIGKILL, 1), ("supervisor", signal.SIGKILL, -9), ("supervisor", signal.SIGINT, 130)],
)
def test_no_process_outlives_the_stage_or_its_supervisor(
    workspace: Path, victim: str, signal_sent: signal.Signals, code: int
) -> None:
    driver = start(workspace, "rl", ONE_RANK)
    wait_until(lambda: processes(driver, "ray::EngineActor") or driver.poll() is not None)
    everybody = processes(driver)
    assert len(everybody) > 5, said(workspace)
    pid = driver.pid if victim == "supervisor" else psutil.Process(driver.pid).children()[0].pid
    os.kill(pid, signal_sent)
    assert driver.wait(timeout=PATIENCE_S) == code
    wait_until_ended(everybody)


def test_the_same_command_finishes_the_ended_stage(workspace: Path) -> None:
    driver = start(workspace, "rl", ONE_RANK)
    wait_until(lambda: processes(driver, "ray::EngineActor") or driver.poll() is not None)
    everybody = processes(driver)
    assert driver.wait(timeout=PATIENCE_S) == 0, said(workspace)
    wait_until_ended(everybody)
    assert steps(workspace) == list(range(1, NUM_STEPS + 1))
    manifest = json.loads((stage(workspace) / "manifest.json").read_text())
    assert 2 <= manifest["resumed_from"] < NUM_STEPS
    assert (stage(workspace) / "model" / "model.safetensors").exists()

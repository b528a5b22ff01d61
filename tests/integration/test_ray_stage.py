"""The RL stage under `cluster: ray` as a real program: whatever is killed, it ends with one reason, leaves no process,
and the same command resumes it.

The tests are one story of one stage, in order: each goes on where the one before was ended. Its supervisor is this
process; `test_supervision` strikes supervisors, with which their stages end.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from stages_in_thread import RayStagesInThread
from support.holding import Hold
from support.installed import needs_vllm
from support.patience import PATIENCE_S, wait_until, wait_until_ended

from luffy.errors import EXIT_TEMPORARY
from luffy.pipeline.reuse import complete_checkpoints

pytestmark = [pytest.mark.slow, needs_vllm]
TWO_RANKS = "execution.ray={trainer_ranks: 2, start_timeout_s: 600, call_timeout_s: 600}"
ONE_RANK = "execution.ray={trainer_ranks: 1, start_timeout_s: 600, call_timeout_s: 600}"
NUM_STEPS = 7
"""Each of the two requests to end lets a stage finish the next step; the last start has some left."""
HELD_AT = 3
"""The first step that is not in the checkpoint of step 2."""
OVERRIDES = (f"rl.steps={NUM_STEPS}", f"execution.grace_s={PATIENCE_S}")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, request) -> Iterator[Path]:
    """Has the stages that RL needs."""
    workspace = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        hold = Hold(workspace, "rl", HELD_AT)
        hold.release()
        for name, value in hold.environment.items():
            patch.setenv(name, value)
        request.getfixturevalue("warm_stages")  # only now, since a warm server starts no stage in another environment
        with RayStagesInThread(workspace, "prepare_data,base", "cluster=local", "rl.max_staleness=0") as stages:
            stages.wait()
        yield workspace


@contextmanager
def held(workspace: Path, layout: str) -> Iterator[tuple[RayStagesInThread, Callable[[], None]]]:
    """RL, stopped where step `HELD_AT` is done, and what lets it go on."""
    hold = Hold(workspace, "rl", HELD_AT)
    with RayStagesInThread(workspace, "rl", layout, *OVERRIDES) as stages:
        wait_until(lambda: hold.is_reached() or stages.is_over(), "the stage's stop")
        assert not stages.is_over(), stages.failure()
        yield stages, hold.release


def until_an_engine_starts(processes: Callable[[str], list[psutil.Process]], is_over: Callable[[], bool]) -> None:
    wait_until(lambda: processes("ray::EngineActor") or is_over(), "an engine's process")


def stage(workspace: Path) -> Path:
    (directory,) = (workspace / "stages" / "rl").iterdir()
    return directory


def newest_checkpoint(workspace: Path) -> int:
    return max(complete_checkpoints(stage(workspace)))


def writes(process: psutil.Process, log: str) -> bool:
    return Path(f"/proc/{process.pid}/fd/1").resolve().name == log


def test_a_killed_rank_ends_the_stage_and_is_named(workspace):
    with held(workspace, TWO_RANKS) as (stages, go_on):
        everybody = stages.processes()
        (victim,) = (process for process in stages.processes("ray::RankActor") if writes(process, "rank_1.log"))
        victim.kill()
        go_on()
        failure = stages.failure()
    assert failure.exit_code == 1
    assert re.match("rl failed with exit code 75: trainer rank 1 died; the same command resumes", str(failure))
    wait_until_ended(everybody)


def test_the_loss_of_rays_head_ends_the_stage(workspace):
    resumed = newest_checkpoint(workspace)
    with held(workspace, ONE_RANK) as (stages, go_on):
        assert stages.recorder.texts("started") == [f"from step {resumed}"]
        everybody = stages.processes()
        (engine,) = stages.processes("ray::EngineActor")
        (head,) = stages.processes("gcs_server")
        # Who has nothing to ask of the head goes on without it: toy steps would all be done before it is missed. A
        # stopped engine is one with long answers.
        engine.suspend()
        head.kill()
        go_on()
        failure = stages.failure()
    assert failure.exit_code == 1
    assert re.match(r"rl failed with exit code 75: Ray's head at \S+ is gone; the same command", str(failure))
    wait_until_ended(everybody)


def test_sigterm_to_every_process_of_the_stage_ends_it_with_a_checkpoint_of_its_step(workspace):
    """Ranks, engines and Ray's daemons get it with the stage, as from a scheduler."""
    resumed = newest_checkpoint(workspace)
    with held(workspace, ONE_RANK) as (stages, go_on):
        everybody = stages.processes()
        for process in everybody:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        go_on()
        failure = stages.failure()
    assert failure.exit_code == EXIT_TEMPORARY, failure
    step = newest_checkpoint(workspace)
    assert step > resumed
    assert str(failure).startswith(f"rl was asked to end: step {step} of {NUM_STEPS} is saved; the same")
    wait_until_ended(everybody)


def test_no_process_outlives_the_stage(workspace):
    """`test_supervision` has Ctrl-C, which ends all processes with the mark of the stage."""
    with RayStagesInThread(workspace, "rl", ONE_RANK, *OVERRIDES) as stages:
        until_an_engine_starts(stages.processes, stages.is_over)
        everybody = stages.processes()
        assert len(everybody) > 5
        stages.stage().kill()
        assert stages.failure().exit_code == 1
    wait_until_ended(everybody)


def test_the_same_command_finishes_the_ended_stage(workspace):
    with RayStagesInThread(workspace, "rl", ONE_RANK, *OVERRIDES) as stages:
        until_an_engine_starts(stages.processes, stages.is_over)
        everybody = stages.processes()
        assert len(everybody) > 5
        stages.wait()
    wait_until_ended(everybody)
    rows = (stage(workspace) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    manifest = json.loads((stage(workspace) / "manifest.json").read_text())
    assert 2 <= manifest["resumed_from"] < NUM_STEPS
    assert (stage(workspace) / "model" / "model.safetensors").exists()

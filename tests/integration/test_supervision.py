"""Real stage processes under supervision: what is passed on, and that nothing outlives its supervisor."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.patience import lives, wait_until
from toy_run import Recorder, toy_run

from luffy.errors import StageFailed
from luffy.pipeline.job import JOB_FILE, write_job
from luffy.pipeline.lock import holder_of
from luffy.pipeline.supervise import supervise

DRIVER = Path(__file__).with_name("toy_run.py")


def driver(root, *nodes):
    return subprocess.Popen([sys.executable, str(DRIVER), str(root), *nodes], stdout=subprocess.PIPE, text=True)


def read_until(process, pattern):
    """Lines of the driver up to the one that matches; returns the match."""
    for line in process.stdout:
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"the driver ended without {pattern!r}")


def checkpoint_written(root):
    return any(root.glob("stages/prepare_data/*/checkpoints/step_000002/COMPLETE"))


def stage_pid(root):
    (directory,) = (root / "stages" / "prepare_data").iterdir()
    return int(re.search(r"pid (\d+)", holder_of(directory))[1])


def test_events_and_log_lines_are_passed_on(tmp_path):
    code = "import os; print('WARNING one'); print('two')"
    lines = []
    supervise([sys.executable, "-c", code], tmp_path, on_event=lambda event: None, on_line=lines.append)
    assert lines == ["WARNING one", "two"]
    assert (tmp_path / "log.txt").read_text() == "WARNING one\ntwo\n"


def test_progress_arrives_from_first_to_last(tmp_path):
    recorder = Recorder()
    manifest = toy_run(tmp_path).execute("prepare_data", recorder)
    assert recorder.texts("progress")[0] == "1/3"
    assert recorder.texts("progress")[-1] == "3/3"
    assert [kind for kind, _ in recorder.told][-1] == "done"
    assert manifest.metrics == {"loss": 0.5}
    assert not list(tmp_path.glob("stages/*/*/shards"))


def test_the_users_mistake_keeps_its_line_and_exit_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_MODE", "mistake")
    with pytest.raises(StageFailed, match=r"^train\.jsonl:3: prompt: missing; add it$") as caught:
        toy_run(tmp_path).execute("prepare_data", Recorder())
    assert caught.value.exit_code == 2


def test_a_stage_that_cannot_write_its_error_ends_in_one_line_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_MODE", "quota")
    with pytest.raises(StageFailed, match=r"^[^\n]*: no space left; [^\n]* the stage resumes$") as caught:
        toy_run(tmp_path).execute("prepare_data", Recorder())
    assert caught.value.exit_code == 2
    monkeypatch.delenv("TOY_MODE")
    assert toy_run(tmp_path).execute("prepare_data", Recorder()).resumed_from == 2


def test_a_crash_carries_the_end_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_MODE", "crash")
    with pytest.raises(StageFailed) as caught:
        toy_run(tmp_path).execute("prepare_data", Recorder())
    assert caught.value.exit_code == 1
    assert "prepare_data failed with exit code 1: RuntimeError: the matrix is not finite" in str(caught.value)
    assert "Traceback" in str(caught.value)


@pytest.mark.slow
def test_a_time_limit_ends_all_stage_processes_and_the_next_run_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_MODE", "family")
    monkeypatch.setenv("TOY_HANGS_AT", "3")
    recorder = Recorder()
    limit_s = 86400.0
    passes = SimpleNamespace(
        sleep=time.sleep, monotonic=lambda: time.monotonic() + limit_s * checkpoint_written(tmp_path)
    )
    monkeypatch.setattr("luffy.pipeline.supervise.time", passes)
    limit = f"execution.time_limits_s={{prepare_data: {limit_s}}}"
    with pytest.raises(StageFailed, match="prepare_data has reached its time limit; the same command") as caught:
        toy_run(tmp_path, limit).execute("prepare_data", recorder)
    assert caught.value.exit_code == 1
    (child,) = re.findall(r"child (\d+)", "\n".join(recorder.texts("line")))
    assert not lives(int(child))
    assert toy_run(tmp_path).experiment.plan_node("prepare_data").action == "resume"


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


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_stopping_the_supervisor_ends_all_stage_processes(tmp_path, monkeypatch, error):
    monkeypatch.setenv("TOY_MODE", "family")
    monkeypatch.setenv("TOY_STEP_S", "30")
    pids = []

    class Stopper(Recorder):
        def line(self, plan, text):
            pids.extend(int(pid) for pid in re.findall(r"child (\d+)", text))
            if pids:
                raise error

    with pytest.raises(error):
        toy_run(tmp_path).execute("prepare_data", Stopper())
    assert pids
    assert not any(lives(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "said"), [("family", r"child (\d+)"), ("deaf", "progress")])
def test_kill_9_of_the_supervisor_leaves_nothing_behind(tmp_path, monkeypatch, mode, said):
    """Also of a stage that ignores SIGTERM: it notices that it is orphaned."""
    monkeypatch.setenv("TOY_MODE", mode)
    monkeypatch.setenv("TOY_STEP_S", "60")
    process = driver(tmp_path, "prepare_data")
    started = map(int, read_until(process, said).groups())
    left = [stage_pid(tmp_path), *started]
    assert all(map(lives, left))
    process.kill()
    wait_until(lambda: not any(map(lives, left)))


@pytest.mark.slow
def test_kill_9_of_the_stage_ends_its_children_and_the_next_run_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_MODE", "family")
    monkeypatch.setenv("TOY_HANGS_AT", "4")
    monkeypatch.setenv("TOY_STEP_S", "0.3")  # so far apart that each step's event is written
    monkeypatch.setenv("TOY_STEPS", "8")
    killed = []

    class Killer(Recorder):
        def event(self, plan, event):
            super().event(plan, event)
            if event.step == 4 and not killed:
                killed.append(event.pid)
                os.kill(event.pid, signal.SIGKILL)

    recorder = Killer()
    with pytest.raises(StageFailed, match="prepare_data was ended by SIGKILL"):
        toy_run(tmp_path).execute("prepare_data", recorder)
    child = int(re.search(r"child (\d+)", "\n".join(recorder.texts("line")))[1])
    assert not lives(child)
    monkeypatch.setenv("TOY_MODE", "")
    monkeypatch.delenv("TOY_HANGS_AT")
    again = Recorder()
    manifest = toy_run(tmp_path).execute("prepare_data", again)
    assert again.texts("planned") == ["resume from step 3"]
    assert (again.texts("progress")[0], manifest.resumed_from) == ("4/8", 3)

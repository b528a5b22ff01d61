"""SIGTERM, as schedulers send it: stages end in order within their grace, and go on to the same bits."""

import json
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from campaigns.random_kills import differences, promised, promised_of
from flow_process import UNDISTURBED, start
from forked_program import ForkedProgram
from support.patience import PATIENCE_S, wait_until

from luffy.pipeline.job import JOB_FILE, read_job, write_job
from luffy.pipeline.manifest import read_manifest
from luffy.pipeline.reuse import newest_checkpoint
from luffy.pipeline.supervise import stage_command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_stages")]
SMOKE = "exp_configs/smoke.yaml"


class Stage:
    """A stage of the finished smoke run, made once more in a directory of its own by its program."""

    def __init__(self, workspace: Path, name: str, out: Path, **execution: object) -> None:
        self.original = sorted(workspace.glob(f"stages/{name}/*"))[0]
        self.name, self.out = name, out
        job = read_job(self.original / JOB_FILE)
        changed = job.execution.model_copy(update={"grace_s": PATIENCE_S, **execution})
        out.mkdir()
        write_job(out / JOB_FILE, job.model_copy(update={"execution": changed}))

    def start(self) -> ForkedProgram:
        return ForkedProgram(stage_command(self.name, self.out), self.out / "log.txt")

    def run(self) -> int:
        """Its exit code."""
        return self.start().ended()

    def events(self, kind: str) -> list[dict[str, object]]:
        path = self.out / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def assert_equal_to_the_original(self) -> None:
        assert differences(promised_of(self.out), promised_of(self.original)) == []

    def log(self) -> str:
        return (self.out / "log.txt").read_text()


def once_seen(stage: Stage, kind: str, started: ForkedProgram) -> None:
    wait_until(lambda: stage.events(kind) or started.poll() is not None, f"{kind} in {stage.name}")


@pytest.mark.parametrize(("name", "seen"), [("sft", "started"), ("rl", "progress")])
def test_training_writes_a_checkpoint_after_its_step_and_goes_on_from_there_to_the_same_bits(
    undisturbed, tmp_path, name, seen
):
    """The signal is for every process: those that grade for RL, which are there after its first step, get it, too."""
    stage = Stage(undisturbed[0], name, tmp_path / name)
    process = stage.start()
    once_seen(stage, seen, process)
    for helper in psutil.Process(process.pid).children(recursive=True):
        helper.terminate()
    process.send(signal.SIGTERM)
    assert process.ended() == 75, stage.log()
    (stopped,) = stage.events("stopped")
    step, _ = newest_checkpoint(stage.out) or (0, None)
    assert stopped["text"].startswith(f"was asked to end: step {step} of ")
    assert stage.run() == 0
    assert [event["text"] for event in stage.events("started")] == ["", f"from step {step}"]
    stage.assert_equal_to_the_original()


def test_an_evaluation_keeps_the_batches_under_way_and_generates_none_twice(undisturbed, tmp_path):
    stage = Stage(undisturbed[0], "evaluate", tmp_path / "evaluate", rollout_batch_size=1)
    process = stage.start()
    # Step 0 says that the engine is ready.
    wait_until(lambda: any(event["step"] for event in stage.events("progress")) or process.poll() is not None)
    process.send(signal.SIGTERM)
    assert process.ended() == 75, stage.log()
    done = sum(map(bool, (stage.out / "answers.jsonl").read_bytes().splitlines()))
    assert done >= stage.events("progress")[-1]["step"] > 0
    assert stage.run() == 0
    assert read_manifest(stage.out).resumed_from == done
    stage.assert_equal_to_the_original()


def test_a_second_signal_ends_at_once(undisturbed, tmp_path):
    stage = Stage(undisturbed[0], "rl", tmp_path / "rl")
    process = stage.start()
    once_seen(stage, "started", process)
    # Stopped, so that both are there before it gets to the end of a step.
    process.send(signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT, signal.SIGTERM)
    assert process.ended() in (75, 130), stage.log()


def test_the_deadline_ends_at_once(undisturbed, tmp_path):
    stage = Stage(undisturbed[0], "rl", tmp_path / "rl", grace_s=0.001)
    process = stage.start()
    once_seen(stage, "started", process)
    process.send(signal.SIGTERM)
    assert process.ended() == 130, stage.log()
    assert [event["text"] for event in stage.events("failed")] == ["interrupted"]


def test_a_run_ends_in_one_line_and_the_same_command_goes_on(undisturbed, tmp_path):
    """The stages before RL are there."""
    workspace = shutil.copytree(undisturbed[0], tmp_path / "workspace", symlinks=True)
    for name in ("rl", "evaluate_rl", "report"):
        shutil.rmtree((workspace / "runs" / "smoke-1" / "stages" / name).resolve())
    flow = start(workspace, *UNDISTURBED, flow="full_pipeline")
    wait_until(lambda: any('"started"' in path.read_text() for path in workspace.glob("stages/rl/*/events.jsonl")))
    flow.terminate()
    _, err = flow.communicate(timeout=PATIENCE_S)
    assert flow.returncode == 75, err
    assert err == "error: interrupted; the same command resumes\n"
    (directory,) = workspace.glob("stages/rl/*")
    assert newest_checkpoint(directory) is not None
    again = start(workspace, *UNDISTURBED, flow="full_pipeline")
    assert again.wait(PATIENCE_S) == 0, again.communicate()
    assert differences(promised(workspace), promised(undisturbed[0])) == []

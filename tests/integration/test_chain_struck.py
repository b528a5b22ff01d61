"""What may happen to the chain of exp_configs/smoke.yaml: kills of every process at chosen, placed and random moments,
signals, Ctrl-C, and the environments of other launchers. The result is that of the undisturbed run."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random

import psutil
import pytest
from campaigns.random_kills import VICTIMS, Pipeline, differences, disturb, draws, processes_of, promised, promised_of
from flow_process import UNDISTURBED, in_terminal, stage_states
from flow_process import run as run_flow
from flow_process import start as start_flow
from support.holding import Hold
from support.patience import PATIENCE_S, ran, wait_until
from support.prefect_api import place_empty_database, shared_api
from support.sandboxed import processes_below
from support.stages import execute

from luffy.config import load_experiment
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.job import JOB_FILE, read_job, write_job
from luffy.pipeline.lock import holder_of
from luffy.pipeline.manifest import read_manifest
from luffy.pipeline.records import read_run
from luffy.pipeline.reuse import newest_checkpoint
from luffy.pipeline.supervise import stage_command
from luffy.pipeline.warm_start import current_warm_server
from luffy.pipeline.workspace import Workspace

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CAMPAIGN = ROOT / "tests/campaigns/placed_kills.py"
PLANNED = list(islice(draws(Random(30), mean_s=7.0), 3))
"""One of each victim."""
HOSTILE = """
MASTER_ADDR=10.255.255.1 MASTER_PORT=29500 RANK=3 WORLD_SIZE=8 LOCAL_RANK=5 LOCAL_WORLD_SIZE=8 LOCAL_SIZE=8 NODE_RANK=1
GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=3 ROLE_WORLD_SIZE=8 ROLE_NAME=default CROSS_RANK=1 CROSS_SIZE=2
TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_ERROR_FILE=/nowhere/error.json
OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=2 PMI_RANK=3 PMI_SIZE=8 PMIX_RANK=3
MV2_COMM_WORLD_SIZE=8 MPI_LOCALRANKID=4 MPI_LOCALNRANKS=8 SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=3
ACCELERATE_USE_FSDP=true FSDP_CPU_RAM_EFFICIENT_LOADING=true ACCELERATE_USE_DEEPSPEED=true ACCELERATE_TORCH_DEVICE=meta
SM_FRAMEWORK_PARAMS={"sagemaker_mpi_enabled":true} SM_HP_MP_PARAMETERS={"partitions":2} SMDATAPARALLEL_LOCAL_RANK=3
VLLM_DP_SIZE=4 VLLM_DP_RANK=2 VLLM_PORT=tcp://10.255.255.1:8000 RAY_ADDRESS=10.255.255.1:6379 DS_ACCELERATOR=cuda
ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=3 PYTHONHASHSEED=12345
PYTHONOPTIMIZE=2 PYTHONSTARTUP=/nowhere.py PYTHONINTMAXSTRDIGITS=640
"""


def without(undisturbed, folder, *nodes):
    """A copy of the workspace in which these stages have yet to be made."""
    workspace = shutil.copytree(undisturbed[0], folder / "workspace", symlinks=True)
    for node in nodes:
        shutil.rmtree((workspace / "runs" / "smoke-1" / "stages" / node).resolve())
    return workspace


def start(workspace, *more, **environment):
    return start_flow(workspace, *UNDISTURBED, *more, flow="full_pipeline", **environment)


@pytest.fixture
def below_a_launcher(undisturbed, monkeypatch):
    """The environment of this process, after everything that tests share was started in its own."""
    shared_api()
    for variable in HOSTILE.split():
        monkeypatch.setenv(*variable.split("=", 1))


def test_a_chain_whose_flow_is_killed_and_goes_on_below_a_launcher_gives_the_same_bytes(
    undisturbed, below_a_launcher, tmp_path
):
    """Data, RL and its evaluation; the flow and then the warm server of the next one are killed at held steps."""
    workspace = without(undisturbed, tmp_path, "prepare_data", "rl", "evaluate_rl")
    directory = next(workspace.glob("stages/rl")) / (undisturbed[0] / "runs/smoke-1/stages/rl").resolve().name
    for step, victim in ((3, "flow"), (5, "warm server")):
        hold = Hold(tmp_path, "rl", step)
        flow = start(workspace, **hold.environment)
        hold.wait(flow)
        program = psutil.Process(int(re.search(r"pid (\d+)", holder_of(directory))[1]))
        assert "luffy.pipeline.warm_start" in program.parent().cmdline()
        {"flow": flow, "warm server": program.parent()}[victim].kill()
        said, _ = flow.communicate(timeout=PATIENCE_S)
        assert bool(re.search(r"rl: resume from step \d", said)) == (step > 3), victim
        wait_until(lambda: processes_of(workspace) == [])
        assert not (directory / "manifest.json").exists()
    result = run_flow(workspace, *UNDISTURBED, flow="full_pipeline")
    assert result.returncode == 0, result.stderr
    again = {"prepare_data": "reused", "base": "reused", "rl": "finished", "evaluate_rl": "finished"}
    assert stage_states(result).items() >= again.items()
    assert differences(promised(workspace), promised(undisturbed[0])) == []


def test_kills_of_flow_and_host_in_a_second_rl_give_the_same_bytes_and_leave_no_process(undisturbed, tmp_path):
    """What is before it in the chain is reused; undisturbed it is made in this process."""
    workspace, chain = without(undisturbed, tmp_path), tmp_path / "chain.yaml"
    again = "{again: {kind: rl, rl: {steps: 4}, execution: {checkpoint: {rl_every: 1}}}}"
    chain.write_text(f"extends: {ROOT}/exp_configs/smoke.yaml\nstages: [prepare_data, base, sft, rl, {again}]\n")
    experiment = open_experiment(load_experiment(chain), Workspace(workspace))
    directory = experiment.plan_node("again").directory
    for step, victim in ((2, "flow"), (3, "host")):
        hold = Hold(tmp_path, "rl", step)
        flow = start_flow(workspace, chain, flow="full_pipeline", **hold.environment)
        hold.wait(flow)
        program = psutil.Process(int(re.search(r"pid (\d+)", holder_of(directory))[1]))
        {"flow": flow, "host": program.parent()}[victim].kill()
        flow.communicate(timeout=PATIENCE_S)
        wait_until(lambda: processes_of(workspace) == [])
        assert not (directory / "manifest.json").exists()
    result = run_flow(workspace, chain, flow="full_pipeline")
    reused = dict.fromkeys(("prepare_data", "base", "sft", "rl"), "reused")
    assert stage_states(result) == {**reused, "again": "finished"}, result.stderr
    assert read_manifest(directory).resumed_from >= 2
    killed = promised_of(directory)
    shutil.rmtree(directory)
    execute(experiment, "again")
    assert differences(killed, promised_of(directory)) == []


def test_kills_at_random_moments_give_the_result_of_an_undisturbed_run(undisturbed, tmp_path):
    """Of the flow, a stage and the Prefect server. tests/campaigns/random_kills.py makes a hundred."""
    (config, *overrides), kills, chains = UNDISTURBED, [], 0
    while len(kills) < len(PLANNED):  # a second chain only where the first was too fast for all of them
        pipeline, chains = Pipeline(tmp_path / str(chains), config, tuple(overrides)), chains + 1
        place_empty_database(pipeline.workspace / "prefect")
        attempt = None
        while attempt is None or attempt.exit_code != 0:
            attempt = disturb(pipeline, iter(PLANNED[len(kills) :]), patience_s=PATIENCE_S)
            assert attempt.problems == ()
            kills += attempt.kills
        assert differences(promised(pipeline.workspace), promised(undisturbed[0])) == []
    assert [kill.victim for kill in kills] == [victim for _, victim in PLANNED]
    assert {kill.victim for kill in kills} == set(VICTIMS)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc libc6-dev")
def test_kills_and_a_full_disk_at_the_writes_of_stages_lose_nothing_and_repeat_no_finished_step(tmp_path):
    """A seeded selection of the campaign's faults."""
    stages = ["--only", "prepare_data", "--only", "sft", "--only", "damaged"]
    for number, chosen in ((6, stages), (3, ["--only", "sft", "--full"])):
        table = tmp_path / f"{number}.csv"
        where = ["--workspace", tmp_path / "placed", "--csv", table, "--seed", "3", "--per-stage", "30"]
        result = ran([sys.executable, CAMPAIGN, *where, *chosen, "--sample", str(number)], cwd=ROOT)
        assert result.returncode == 0, result.stdout + result.stderr
        trials = list(csv.DictReader(table.open()))
        assert len(trials) == number and ({trial["moment"] for trial in trials} == {"full"}) == ("--full" in chosen)


class Stage:
    """A stage of the finished smoke run, made once more in a directory of its own by its program."""

    def __init__(self, workspace: Path, name: str, out: Path, **execution: object) -> None:
        self.original = sorted(workspace.glob(f"stages/{name}/*"))[0]
        self.name, self.out = name, out
        job = read_job(self.original / JOB_FILE)
        changed = job.execution.model_copy(update={"grace_s": PATIENCE_S, **execution})
        out.mkdir()
        write_job(out / JOB_FILE, job.model_copy(update={"execution": changed}))

    def start(self, awaited: str = "") -> None:
        """Fork its program from the warm server, or start it cold where there is none; wait for a kind of event."""
        command, log, server = stage_command(self.name, self.out), self.out / "log.txt", current_warm_server()
        warm = None if server is None else server.start(command, log, os.environ)
        with log.open("ab") as out:
            self.process = warm or subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        wait_until(lambda: not awaited or self.events(awaited) or self.process.poll() is not None, awaited)

    def send(self, *numbers: signal.Signals) -> int:
        """Its exit code, with which it ends after these signals."""
        for number in numbers:
            os.kill(self.process.pid, number)
        wait_until(lambda: self.process.poll() is not None, "the end of the program")
        return self.process.poll()

    def events(self, kind: str) -> list[dict[str, object]]:
        path = self.out / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def assert_equal_to_the_original(self) -> None:
        self.start()
        assert self.send() == 0
        assert differences(promised_of(self.out), promised_of(self.original)) == []

    def log(self) -> str:
        return (self.out / "log.txt").read_text()


@pytest.mark.usefixtures("warm_stages")
@pytest.mark.parametrize(("name", "seen"), [("sft", "started"), ("rl", "progress")])
def test_training_that_gets_sigterm_writes_a_checkpoint_after_its_step_and_goes_on_from_there(
    undisturbed, tmp_path, name, seen
):
    """The signal is for every process: those that grade for RL, which are there after its first step, get it, too."""
    stage = Stage(undisturbed[0], name, tmp_path / name)
    stage.start(seen)
    for helper in psutil.Process(stage.process.pid).children(recursive=True):
        helper.terminate()
    assert stage.send(signal.SIGTERM) == 75, stage.log()
    (stopped,) = stage.events("stopped")
    step, _ = newest_checkpoint(stage.out) or (0, None)
    assert stopped["text"].startswith(f"was asked to end: step {step} of ")
    stage.assert_equal_to_the_original()
    assert [event["text"] for event in stage.events("started")] == ["", f"from step {step}"]


@pytest.mark.usefixtures("warm_stages")
def test_an_evaluation_that_gets_sigterm_keeps_the_batches_under_way_and_generates_none_twice(undisturbed, tmp_path):
    stage = Stage(undisturbed[0], "evaluate", tmp_path / "evaluate", rollout_batch_size=1)
    stage.start()
    wait_until(lambda: any(event["step"] for event in stage.events("progress")) or stage.process.poll() is not None)
    assert stage.send(signal.SIGTERM) == 75, stage.log()
    done = sum(map(bool, (stage.out / "answers.jsonl").read_bytes().splitlines()))
    assert done >= stage.events("progress")[-1]["step"] > 0
    stage.assert_equal_to_the_original()
    assert read_manifest(stage.out).resumed_from == done


@pytest.mark.usefixtures("warm_stages")
def test_a_second_signal_and_the_deadline_end_at_once(undisturbed, tmp_path):
    twice = Stage(undisturbed[0], "rl", tmp_path / "twice")
    twice.start("started")
    # Stopped, so that both are there before it gets to the end of a step.
    ended = twice.send(signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT, signal.SIGTERM)
    assert ended in (75, 130), twice.log()
    late = Stage(undisturbed[0], "rl", tmp_path / "late", grace_s=0.001)
    late.start("started")
    assert late.send(signal.SIGTERM) == 130, late.log()
    assert [event["text"] for event in late.events("failed")] == ["interrupted"]


def test_a_run_that_gets_sigterm_ends_in_one_line_and_the_same_command_goes_on(undisturbed, tmp_path):
    workspace = without(undisturbed, tmp_path, "rl", "evaluate_rl", "report")
    flow = start(workspace)
    wait_until(lambda: any('"started"' in path.read_text() for path in workspace.glob("stages/rl/*/events.jsonl")))
    flow.terminate()
    _, err = flow.communicate(timeout=PATIENCE_S)
    assert (flow.returncode, err) == (75, "error: interrupted; the same command resumes\n")
    (directory,) = workspace.glob("stages/rl/*")
    assert newest_checkpoint(directory) is not None
    again = start(workspace)
    assert again.wait(PATIENCE_S) == 0, again.communicate()
    assert differences(promised(workspace), promised(undisturbed[0])) == []


def test_ctrl_c_ends_the_stages_that_run_side_by_side(undisturbed, tmp_path):
    """An evaluation beside training, after those that come before them, which are reused."""
    workspace, begun = without(undisturbed, tmp_path), set()
    longer = ("execution.parallel_stages=2", "sft.epochs=5000", "evaluation.max_response_tokens=64")
    flow = start(workspace, *longer)
    for line in flow.stdout:
        begun |= set(re.findall(r" (sft|evaluate_base): run", line))
        if begun == {"sft", "evaluate_base"}:
            break
    flow.send_signal(signal.SIGINT)
    _, err = flow.communicate(timeout=PATIENCE_S)
    assert flow.returncode == 130 and "interrupted; the same command resumes" in err, err
    assert processes_of(workspace) == []
    record = json.loads((workspace / "runs/smoke-2/run.json").read_text())
    assert record["state"] == "interrupted"
    assert list(record["stages"]) == ["prepare_data", "base", "sft", "evaluate_base"]


def test_an_interrupted_run_from_python_ends_with_its_processes_and_continues(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import luffy\nluffy.run('smoke', workspace={str(tmp_path / 'workspace')!r})\n")
    process = in_terminal([sys.executable, script], subprocess.PIPE, cwd=ROOT)
    wait_until(lambda: [*(tmp_path / "workspace").glob("stages/base/*/checkpoints/step_*/COMPLETE")], "a checkpoint")
    below = processes_below(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert said.endswith("KeyboardInterrupt: interrupted; the same command resumes\n")
    wait_until(lambda: not any(each.is_running() for each in below), "the end of the run's processes")
    (record,) = [read_run(directory) for directory in (tmp_path / "workspace" / "runs").iterdir()]
    assert record.condition == "interrupted"

"""Stages of an experiment by their own programs."""

import shutil
from pathlib import Path

from forked_program import ForkedProgram
from support.holding import Hold
from toy_run import Recorder

from luffy.config import load_experiment
from luffy.pipeline.experiment import Experiment, ExperimentRun, open_experiment
from luffy.pipeline.job import write_job
from luffy.pipeline.manifest import finished_manifest
from luffy.pipeline.plan import StagePlan
from luffy.pipeline.supervise import stage_command
from luffy.pipeline.workspace import Workspace

CONFIGS = Path(__file__).parents[2] / "exp_configs"
REVERSING = "kind: arithmetic, num_operations: [1], operations: {reverse: 1}"


def opened(workspace: Path, config: str, *overrides: str) -> Experiment:
    return open_experiment(load_experiment(CONFIGS / config, overrides), Workspace(workspace))


def execute(experiment: Experiment, *nodes: str) -> Path:
    """Make these stages; returns the folder of their run."""
    folder = experiment.workspace.new_run("test", {})
    run = ExperimentRun(experiment, folder)
    for node in nodes:
        run.execute(node, Recorder())
    return folder


def only(stages: Path, kind: str) -> Path:
    """The one finished stage of its kind."""
    (directory,) = (path.parent for path in (stages / kind).glob("*/manifest.json"))
    return directory


def started(experiment: Experiment, node: str) -> tuple[StagePlan, ForkedProgram]:
    """The program of a stage that has no folder yet, with nothing that supervises it."""
    plan = experiment.plan_node(node)
    plan.directory.mkdir(parents=True)
    write_job(plan.directory / "config.yaml", experiment.job(plan))
    return plan, ForkedProgram(stage_command(plan.node.stage, plan.directory), plan.directory / "log.txt")


def assert_a_kill_loses_no_finished_batch(
    experiment: Experiment, node: str, hold: Hold, batch: int, undisturbed: Path, followed_by: str
) -> None:
    """`kill -9` at the hold; the finished stage goes to `undisturbed`, and what follows it does not notice."""
    shutil.move(experiment.plan_node(node).directory, undisturbed)
    plan, program = started(experiment, node)
    hold.wait()
    program.kill()
    hold.release()
    assert not (plan.directory / "manifest.json").exists()
    left = (plan.directory / "answers.jsonl").read_bytes().count(b"\n\n")
    assert 0 < left <= 4
    execute(experiment, node)
    assert finished_manifest(plan.directory).resumed_from == batch * left
    outputs = [path.name for path in undisturbed.iterdir() if path.suffix == ".parquet" or path.stem == "card"]
    assert outputs
    for output in outputs:
        assert (plan.directory / output).read_bytes() == (undisturbed / output).read_bytes()
    assert experiment.plan_node(followed_by).action == "reuse"

"""The chain of smoke.yaml with the stage `difficulty`, by the stages' own programs: a base that has learned to reverse
two digits now and then, its pass rates, and RL on what they leave."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from forked_program import ForkedProgram
from toy_run import Recorder

from luffy.config import load_experiment
from luffy.data.parquet import read_prompts
from luffy.errors import StageFailed
from luffy.pipeline.experiment import Experiment, ExperimentRun, open_experiment
from luffy.pipeline.job import write_job
from luffy.pipeline.manifest import finished_manifest
from luffy.pipeline.supervise import stage_command
from luffy.pipeline.workspace import Workspace

pytestmark = pytest.mark.slow
SMOKE = Path(__file__).parents[2] / "exp_configs" / "smoke.yaml"
REVERSING = "kind: arithmetic, num_operations: [1], operations: {reverse: 1}"
CHANGES = [
    "chain=rl",
    "method=luffy",
    f"data.train={{{REVERSING}, num_prompts: 24}}",
    f"data.corpus={{{REVERSING}, num_prompts: 512, unique: false, stepwise_share: 0.0}}",
    "base.steps=150",
    "rl={steps: 2, prompts_per_step: 2, prompts_per_update: 1}",
    "difficulty={num_samples: 8, max_response_tokens: 16, min_pass_rate: 0.1, max_pass_rate: 0.7}",
    "execution.rollout_batch_size=8",  # a prompt a batch
    "evaluation.only=[retention]",
    "evaluation.decodings.sampled=null",
]
HELD = ("difficulty", 32)
"""After four batches."""
OUTPUTS = ("pass_rates.parquet", "train.parquet", "card.json", "card.md")


@pytest.fixture(scope="module")
def finished(holding, tmp_path_factory) -> Path:
    """A workspace after one undisturbed run."""
    workspace = tmp_path_factory.mktemp("finished")
    experiment = opened(workspace)
    run = started(experiment)
    for plan in experiment.plan():
        run.execute(plan.node.name, Recorder())
    return workspace


@pytest.fixture
def workspace(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "workspace", symlinks=True)
    return tmp_path / "workspace"


def opened(workspace: Path, *overrides: str) -> Experiment:
    return open_experiment(load_experiment(SMOKE, [*CHANGES, *overrides]), Workspace(workspace))


def started(experiment: Experiment) -> ExperimentRun:
    return ExperimentRun(experiment, experiment.workspace.new_run("test", {}))


def rates(directory: Path) -> list[dict]:
    return pq.read_table(directory / "pass_rates.parquet").to_pylist()


def test_rl_learns_only_from_prompts_within_the_bounds(finished):
    experiment = opened(finished)
    directory = experiment.plan_node("difficulty").directory
    measured = rates(directory)
    within = {row["uid"] for row in measured if 0.1 <= row["num_correct"] / 8 <= 0.7}
    assert len(measured) == 24
    assert 2 <= len(within) < 24
    assert {prompt.uid for prompt in read_prompts(directory / "train.parquet")} == within
    assert all(prompt.traces for prompt in read_prompts(directory / "train.parquet"))
    rl = experiment.plan_node("rl")
    assert rl.inputs["data"] == directory
    journal = [pq.read_table(file).to_pylist() for file in (rl.directory / "journal").glob("*.parquet")]
    assert {row["uid"] for rows in journal for row in rows} <= within
    report = (experiment.plan_node("report").directory / "report.md").read_text()
    assert f"{len(within)} of 24" in report
    assert {plan.action for plan in experiment.plan()} == {"reuse"}


def test_kill_9_loses_no_finished_batch_and_changes_nothing(workspace, finished, holding):
    experiment = opened(workspace)
    plan = experiment.plan_node("difficulty")
    undisturbed = opened(finished).plan_node("difficulty").directory
    shutil.rmtree(plan.directory)
    plan = experiment.plan_node("difficulty")
    plan.directory.mkdir()
    write_job(plan.directory / "config.yaml", experiment.job(plan))
    hold = holding()
    program = ForkedProgram(stage_command("difficulty", plan.directory), plan.directory / "log.txt")
    hold.wait()
    program.kill()
    hold.release()
    assert not (plan.directory / "manifest.json").exists()
    left = (plan.directory / "answers.jsonl").read_bytes().count(b"\n\n")
    assert left == 4
    started(experiment).execute("difficulty", Recorder())
    assert finished_manifest(plan.directory).resumed_from == 8 * left
    for output in OUTPUTS:
        assert (plan.directory / output).read_bytes() == (undisturbed / output).read_bytes()
    assert experiment.plan_node("rl").action == "reuse"


def test_other_bounds_reuse_the_samples(workspace):
    before, wider = opened(workspace), opened(workspace, "difficulty.max_pass_rate=1.0")
    changed = {name for name in before.identities if before.identities[name].key != wider.identities[name].key}
    assert changed == {"difficulty", "rl", "evaluate_rl", "report"}
    started(wider).execute("difficulty", Recorder())
    directory = wider.plan_node("difficulty").directory
    assert finished_manifest(directory).resumed_from == 192
    counts = [[(row["uid"], row["num_correct"]) for row in rates(x.plan_node("difficulty").directory)]
              for x in (before, wider)]  # fmt: skip
    assert counts[0] == counts[1]


def test_a_range_without_prompts_is_one_line_and_exit_code_2(workspace):
    histogram = json.loads((opened(workspace).plan_node("difficulty").directory / "card.json").read_text())["histogram"]
    share = next(int(number) / 8 for number, count in histogram.items() if count == 0)
    empty = opened(workspace, f"difficulty={{min_pass_rate: {share}, max_pass_rate: {share}}}")
    with pytest.raises(StageFailed) as failure:
        started(empty).execute("difficulty", Recorder())
    assert failure.value.exit_code == 2
    assert str(failure.value).startswith("difficulty: no prompt is left of 24: ")
    assert len(str(failure.value).splitlines()) == 1

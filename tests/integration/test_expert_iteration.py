"""Two rounds of expert iteration by the stages' own programs: what each reads, and kill -9 in the second round."""

import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from holding import Hold
from toy_run import Recorder

from luffy.config import load_experiment
from luffy.data.parquet import read_prompts
from luffy.data.sample_card import read_sample_card
from luffy.data.templates import encode_traces, load_tokenizer
from luffy.pipeline.chain.job import write_job
from luffy.pipeline.chain.manifest import finished_manifest
from luffy.pipeline.experiment import Experiment, ExperimentRun, open_experiment
from luffy.pipeline.machine.supervise import stage_command
from luffy.pipeline.workspace import Workspace

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
REVERSING = "kind: arithmetic, num_operations: [1], operations: {reverse: 1}"
CHANGES = [
    "chain=expert_iteration",
    "stages=[prepare_data, base, sample, sft]",
    f"data.train={{{REVERSING}, num_prompts: 24}}",
    f"data.corpus={{{REVERSING}, num_prompts: 512, unique: false, stepwise_share: 0.0}}",
    "base.steps=150",  # reverses two digits now and then
    "sample={num_samples: 8, max_response_tokens: 16, keep: {choose: first, max_per_prompt: 2}}",
    "expert_iteration.rounds=2",
    "sft.num_traces=null",
    "execution.rollout_batch_size=8",  # a prompt a batch
]
OUTPUTS = ("pass_rates.parquet", "sampled.parquet", "card.json", "card.md")


def opened(workspace: Path, *overrides: str) -> Experiment:
    return open_experiment(
        load_experiment(ROOT / "exp_configs/smoke.yaml", [*CHANGES, *overrides]), Workspace(workspace)
    )


def test_two_rounds_and_a_kill_in_the_second(tmp_path: Path) -> None:
    experiment = opened(tmp_path / "workspace")
    run = ExperimentRun(experiment, experiment.workspace.new_run("test", {}))
    nodes = [plan.node.name for plan in experiment.plan()]
    assert nodes == ["prepare_data", "base", "sample_1", "sft_1", "sample_2", "sft_2"]
    for name in nodes:
        run.execute(name, Recorder())
    _check_what_was_learned_from(experiment)
    _check_kill_in_round_two(experiment, tmp_path)
    third = [plan.action for plan in opened(tmp_path / "workspace", "expert_iteration.rounds=3").plan()]
    assert third == [*["reuse"] * 6, "run", "run"]


def _check_what_was_learned_from(experiment: Experiment) -> None:
    """The newest policy's own answers alone, and from the base again."""
    first, second, sft = (experiment.plan_node(name) for name in ("sample_1", "sample_2", "sft_2"))
    own = [trace for prompt in read_prompts(second.directory / "sampled.parquet") for trace in prompt.traces]
    tokenizer = load_tokenizer(sft.directory / "model")
    assert second.inputs["model"] == experiment.plan_node("sft_1").directory
    assert {trace.model for trace in own} == {f"sft/{second.inputs['model'].name}"}
    assert (sft.inputs["data"], sft.inputs["model"]) == (second.directory, experiment.plan_node("base").directory)
    known = [trace for trace in own if trace.logprobs is not None]
    assert known and all(trace.verified for trace in own)
    for trace in known:
        (ids,) = encode_traces(tokenizer, [trace.text])
        assert len(ids) == trace.num_tokens == len(trace.logprobs)
        assert 0 < math.exp(sum(trace.logprobs)) <= 1
    cards = [read_sample_card(plan.directory / "card.json") for plan in (first, second)]
    assert [(card.policy, card.round) for card in cards] == [("base", 1), ("sft_1", 2)]
    assert all(0 < card.kept.traces <= 2 * card.kept.prompts for card in cards)


def _check_kill_in_round_two(experiment: Experiment, tmp_path: Path) -> None:
    """The finished batches count, the others are sampled again, and what follows does not notice."""
    undisturbed = tmp_path / "undisturbed"
    shutil.move(experiment.plan_node("sample_2").directory, undisturbed)
    plan = experiment.plan_node("sample_2")
    plan.directory.mkdir()
    write_job(plan.directory / "config.yaml", experiment.job(plan))
    hold = Hold(tmp_path, "sample", 32)
    command, env = stage_command("sample", plan.directory), {**os.environ, **hold.environment}
    program = subprocess.Popen(command, cwd=ROOT, env=env)
    hold.wait()
    program.kill()
    program.wait()
    assert not (plan.directory / "manifest.json").exists()
    left = len(list((plan.directory / "shards").glob("*.json")))
    assert 0 < left < 24
    ExperimentRun(experiment, experiment.workspace.new_run("again", {})).execute("sample_2", Recorder())
    assert finished_manifest(plan.directory).resumed_from == 8 * left
    for output in OUTPUTS:
        assert (plan.directory / output).read_bytes() == (undisturbed / output).read_bytes()
    assert experiment.plan_node("sft_2").action == "reuse"

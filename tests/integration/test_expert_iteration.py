"""Two rounds of expert iteration, made by a comparison: what each reads, what the comparison counts of them, and a
`kill -9` in the second round."""

import json
import math
from pathlib import Path

import pytest
import real_run
from flow_process import run, states
from real_run import REVERSING, assert_a_kill_loses_no_finished_batch

from luffy.data.parquet import read_prompts
from luffy.data.pass_rates import SampleCard, read_card
from luffy.data.templates import encode_traces, load_tokenizer
from luffy.pipeline.experiment import Experiment
from luffy.pipeline.manifest import finished_manifest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROMPTS, SAMPLES = 12, 8
START = [
    f"data.train={{{REVERSING}, num_prompts: {PROMPTS}}}",
    f"data.corpus={{{REVERSING}, num_prompts: 512, unique: false, stepwise_share: 0.0}}",
    "base.steps=150",  # reverses two digits now and then
    f"execution.rollout_batch_size={SAMPLES}",  # a prompt a batch
    "execution.parallel_stages=1",  # so that one warm server serves all
]
ROUNDS = [
    f"sample.num_samples={SAMPLES}",
    "sample.max_response_tokens=16",
    "sample.keep={choose: first, max_per_prompt: 2}",
    "expert_iteration.rounds=2",
    "sft.num_traces=null",
]
CHANGES = [
    "chain=expert_iteration",
    "method=sft",
    "stages=[prepare_data, base, sample, sft]",
    *START,
    *ROUNDS,
    "sft.epochs=null",
    "sft.steps=2",  # half of the comparison's budget
]
COMPARISON = f"""\
name: rounds
experiment: {ROOT}/exp_configs/smoke.yaml
overrides: {json.dumps([*START, "evaluation.decodings.sampled=null", "evaluation.only=[retention]"])}
seeds: [7]
reference: sft
budget: {{optimizer_steps: 4}}
arms:
  sft: {{chain: sft, method: sft}}
  expert_iteration: {{chain: expert_iteration, method: sft, overrides: {json.dumps(ROUNDS)}}}
"""
HELD = ("sample", 32)
"""After four batches."""

Compared = tuple[Path, dict[str, str]]
"""The fixture `compared`."""


def opened(workspace: Path, *overrides: str) -> Experiment:
    return real_run.opened(workspace, "smoke.yaml", *CHANGES, *overrides)


@pytest.fixture(scope="module")
def compared(holding, tmp_path_factory) -> Compared:
    """A workspace after the comparison, in which two rounds are finished, and how its stages ended."""
    folder = tmp_path_factory.mktemp("rounds")
    (folder / "rounds.yaml").write_text(COMPARISON)
    result = run(folder / "workspace", "compare", folder / "rounds.yaml")
    assert result.returncode == 0, result.stderr
    return folder / "workspace", states(result)


def test_a_comparison_counts_the_responses_and_the_steps_of_every_round(compared):
    workspace, found = compared
    assert found["expert_iteration 7: sample_1"] == found["expert_iteration 7: sft_2"] == "finished"
    sft, rounds = json.loads((workspace / "runs" / "rounds-1" / "comparison.json").read_text())["arms"]
    assert [arm["cost_a_seed"]["optimizer_steps"] for arm in (sft, rounds)] == [4, 2 * 2]
    assert [arm["cost_a_seed"]["rollouts"] for arm in (sft, rounds)] == [0, 2 * PROMPTS * SAMPLES]
    stages = workspace / "runs" / "rounds-1" / "arms" / "expert_iteration-7" / "stages"
    cards = [read_card(stages / f"sample_{number}" / "card.json", SampleCard).rates for number in (1, 2)]
    tokens = sum(round(PROMPTS * SAMPLES * card.mean_tokens) for card in cards)
    assert rounds["cost_a_seed"]["generated_tokens"] == tokens
    sampling_s = sum(finished_manifest(stages / f"sample_{number}").total_s for number in (1, 2))
    assert rounds["cost_a_seed"]["seconds"] > sampling_s > 0 < sft["cost_a_seed"]["seconds"]


def test_two_rounds_and_a_kill_in_the_second(compared, holding, tmp_path):
    workspace, _ = compared
    experiment = opened(workspace)
    nodes = ["prepare_data", "base", "sample_1", "sft_1", "sample_2", "sft_2"]
    assert [(plan.node.name, plan.action) for plan in experiment.plan()] == [(name, "reuse") for name in nodes]
    _check_what_was_learned_from(experiment)
    assert_a_kill_loses_no_finished_batch(experiment, "sample_2", holding(), SAMPLES, tmp_path / "before", "sft_2")
    third = [plan.action for plan in opened(workspace, "expert_iteration.rounds=3").plan()]
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
    cards = [read_card(plan.directory / "card.json", SampleCard) for plan in (first, second)]
    assert [(card.policy, card.round) for card in cards] == [("base", 1), ("sft_1", 2)]
    assert all(0 < card.kept.traces <= 2 * card.kept.prompts for card in cards)

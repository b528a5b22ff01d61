"""Two environments in one run, and expert iteration with an environment, by the stages' own programs."""

from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from real_run import execute, opened

from luffy.data.parquet import read_prompts
from luffy.data.pass_rates import SampleCard, read_card
from luffy.evaluation.sample_files import read_samples_of
from luffy.pipeline.experiment import Experiment
from luffy.tracking.metrics import METRICS_FILE, read_metrics, training_rows
from luffy.types import Message, Source

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_stages")]
SMALL = [
    "model.architecture={hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, "
    "max_position_embeddings: 256}",
    "base.steps=40",
    "base.batch_size=32",
    "execution={num_threads: 1, retries: 0, rollout_batch_size: 32, checkpoint: {rl_every: 2}}",
    "evaluation={max_response_tokens: 96, decodings: {greedy: {temperature: 0.0}}}",
]
CHAINS = "kind: arithmetic, num_operations: [1], operations: {multiply: 1, reverse: 1}"
GAMES = "kind: guess_number, high: 7, max_turns: 3"


def played(workspace: Path, config: str, changes: list[str]) -> Experiment:
    """The experiment after its stages; of the evaluations after that of the last policy, and without the report."""
    experiment = opened(workspace, config, *SMALL, *changes)
    nodes = (plan.node.name for plan in experiment.plan())
    execute(experiment, *(node for node in nodes if node not in ("evaluate_base", "evaluate_sft", "report")))
    return experiment


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Experiment:
    changes = [
        "chain=sft_then_luffy",
        f"data.train={{kind: mixture, parts: {{chains: {{source: {{{CHAINS}, num_prompts: 12, by_calculator: "
        f"[multiply]}}}}, games: {{source: {{{GAMES}, num_prompts: 12}}}}}}}}",
        f"data.corpus={{{CHAINS}, num_prompts: 256, unique: false}}",
        f"data.suites={{chains: {{{CHAINS}, num_prompts: 4}}, games: {{{GAMES}, num_prompts: 4}}}}",
        "data.max_trace_tokens=96",
        "sft={epochs: 2, batch_size: 8, optimizer: {lr: 3e-3}}",
        "difficulty={num_samples: 2, max_pass_rate: 1.0}",
        "rl={steps: 2, prompts_per_step: 4, max_response_tokens: 96, optimizer: {lr: 1e-3}}",
        "environment.limits={max_turns: 3, max_turn_tokens: 48}",
        "environment.scoring={weights: {answer: 1.0, tools/tool_errors: -0.1, game/found: 0.5}}",
    ]
    return played(tmp_path_factory.mktemp("mixed"), "mixed_environments.yaml", changes)


def test_every_group_is_played_by_its_own_part(mixed):
    directory = mixed.plan_node("rl").directory
    files = sorted((directory / "journal").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    parts = Counter()
    for row in rows:
        measures = dict(row["measures"])
        (part,) = (name for name in ("tools", "game") if measures[f"part/{name}"])
        assert not any(name.startswith({"tools": "game/", "game": "tools/"}[part]) for name in measures)
        right = float(row["outcome"] == "correct")
        extra = 0.5 * measures["game/found"] if part == "game" else -0.1 * measures["tools/tool_errors"]
        assert row["reward"] == pytest.approx(right + extra)
        parts[part] += 1
    assert parts == {"tools": len(rows) // 2, "game": len(rows) // 2}  # the quotas of the training data
    guided = [row for row in rows if Source.OFF_POLICY in row["source"]]
    assert {bool(dict(row["measures"])["part/game"]) for row in guided} == {False, True}


def test_metrics_and_samples_tell_the_parts_apart(mixed):
    metrics = training_rows(read_metrics(mixed.plan_node("rl").directory / METRICS_FILE))
    for row in metrics:
        assert {"reward/tools/mean", "reward/game/correct_share", "rollout/game/guesses_mean"} <= set(row)
        assert row["rollout/part/tools_mean"] == row["rollout/part/game_mean"] == 0.5
    records = list(read_samples_of(mixed.plan_node("evaluate_rl").directory))
    assert {record.suite for record in records} == {"chains", "games"}
    for record in records:
        assert record.measures["part/tools"] == (record.suite == "chains")


def test_the_policys_own_episodes_become_traces_of_many_turns_that_sft_learns(tmp_path):
    changes = [
        "stages=[prepare_data, base, sample, sft]",
        "data.train={num_prompts: 24, num_operations: [1], operations: {multiply: 1, reverse: 1}}",
        f"data.corpus={{{CHAINS}, num_prompts: 256, num_operations: [1], by_calculator: [multiply], unique: false}}",
        f"data.suites={{chains: {{{CHAINS}, num_prompts: 4}}}}",
        "data.max_trace_tokens=96",
        "base={steps: 300, batch_size: 32, optimizer: {lr: 6e-3}}",
        "sample={num_samples: 4, max_response_tokens: 96, keep: {choose: first, max_per_prompt: 2}}",
        "expert_iteration.rounds=1",
    ]
    experiment = played(tmp_path, "tools_expert_iteration.yaml", changes)
    (folder,) = (plan.directory for plan in experiment.plan() if plan.node.stage == "sample")
    card = read_card(folder / "card.json", SampleCard)
    traces = [trace for prompt in read_prompts(folder / "sampled.parquet") for trace in prompt.traces]
    assert card.kept.traces == len(traces) > 0
    called = [trace for trace in traces if trace.turns]
    for trace in called:
        assert [turn.role for turn in (trace.turns[0], trace.turns[-1])] == ["assistant"] * 2
        assert isinstance(trace.turns[1], Message) and "<tool_response>" in trace.turns[1].content

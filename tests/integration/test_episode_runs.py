"""Environments through the stages: data, SFT, RL and evaluation with a game; two environments in one run;
a template that rewrites earlier turns; and a kill in the middle of an episode."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from support.installed import needs_vllm
from support.kills import left_at, within_checkpoint
from support.methods import run_rl
from support.patience import lives, wait_until
from support.sandboxed import require_bubblewrap
from support.stages import CONFIGS, assert_same_result, execute, only, opened, run_stage, upstream_of
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from luffy.config import load_experiment
from luffy.config.experiment import ExperimentConfig
from luffy.data.templates import decode, load_tokenizer
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import DataError, StageFailed
from luffy.evaluation.results import read_results
from luffy.evaluation.sample_files import read_samples_of
from luffy.pipeline.experiment import Experiment, ExperimentRun, StageObserver
from luffy.rl import loop
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import METRICS_FILE, read_metrics, training_rows
from luffy.tracking.rollout_metrics import learned_metrics
from luffy.tracking.tracker import SAMPLES_FILE, read_samples
from luffy.types import SAMPLED, Group, Source, Trajectory

GAME = [
    "chain=sft_then_luffy",
    "data.train={kind: guess_number, num_prompts: 24, high: 7, max_turns: 3}",
    "data.corpus={kind: guess_number, num_prompts: 256, high: 7, player: random, max_turns: 3}",
    "data.suites={games: {kind: guess_number, num_prompts: 8, high: 7, max_turns: 3}}",
    "model.architecture={hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, "
    "max_position_embeddings: 128}",
    "data.max_trace_tokens=64",
    "base.steps=60",
    "base.batch_size=32",
    "sft={epochs: 3, batch_size: 8, optimizer: {lr: 3e-3}}",
    "rl={steps: 3, prompts_per_step: 4, max_response_tokens: 64, optimizer: {lr: 1e-3}, "
    "validation: {every: 3, suites: [games]}}",
    "evaluation={max_response_tokens: 64, decodings: {greedy: {temperature: 0.0}}}",
    "environment={kind: custom, factory: 'dying_game:DyingGame', limits: {max_turns: 3, max_turn_tokens: 8}, "
    "scoring: {weights: {answer: 1.0, turns: -0.125}}}",
    "execution={num_threads: 1, retries: 0, checkpoint: {rl_every: 1}}",
    "tracking.samples_every=1",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Iterator[Path]:
    """The stages of the game, whose module can be imported, here and in all processes."""
    workspace, folder = tmp_path_factory.mktemp("finished"), str(Path(__file__).parent / "episodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        patch.syspath_prepend(folder)
        execute(opened(workspace, "guess_number.yaml", *GAME))
        yield workspace / "stages"


def rows_of(stage: Path) -> list[dict]:
    """The journal of an RL stage."""
    files = sorted((stage / "journal").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def test_groups_hold_rollouts_and_demonstrations_of_many_turns(finished):
    """Turns cost reward, those of a demonstration like those of a rollout."""
    rows = rows_of(only(finished, "rl"))
    guided = [row for row in rows if Source.OFF_POLICY in row["source"]]
    assert len(rows) == 3 * 4 * 8 and len(guided) == 3 * 4
    assert any(Source.ENVIRONMENT in row["source"] for row in guided)
    for row in rows:
        assert row["source"][-1] != Source.ENVIRONMENT
        versions = dict(zip(row["source"], row["weight_version"], strict=True))
        assert versions.get(Source.ENVIRONMENT, -1) == -1
        turns = dict(row["measures"])["turns"]
        assert 1 <= turns <= 3 and row["reward"] == (row["outcome"] == "correct") - 0.125 * turns


def test_metrics_and_samples_tell_of_the_episodes(finished):
    stage = only(finished, "rl")
    metrics = training_rows(read_metrics(stage / METRICS_FILE))
    assert all(1 <= row["rollout/turns_mean"] <= 3 for row in metrics)
    written = [sum(who != Source.ENVIRONMENT for who in row["source"]) for row in rows_of(stage)]
    learned = [row["batch/response_tokens"] for row in metrics]
    assert learned == [sum(written[step * 32 : step * 32 + 32]) for step in range(3)]
    samples = [sample for _, sample in read_samples(stage / SAMPLES_FILE)]
    assert any("--- environment ---" in sample.response for sample in samples)


def test_evaluation_grades_the_last_turn_and_is_the_held_out_accuracy_of_the_same_weights(finished):
    accuracies = {}
    for directory in (path.parent for path in (finished / "evaluate").glob("*/manifest.json")):
        results = read_results(directory / "results.json")
        accuracies[results.checkpoint] = results.rows[0].accuracy
        for record in read_samples_of(directory):
            assert record.reply is not None and record.response.endswith(record.reply)
            assert 1 <= record.measures["turns"] <= 3
            assert record.correct == (record.reply.strip() == record.ground_truth) == bool(record.measures["found"])
    measured = {row["step"]: row for row in read_metrics(only(finished, "rl") / METRICS_FILE)}
    assert measured[0]["val/games/accuracy"] == accuracies["sft"]
    assert measured[3]["val/games/accuracy"] == accuracies["rl"]


@pytest.mark.slow
def test_a_kill_in_the_middle_of_an_episode_a_tool_call_and_its_code_costs_no_bit(finished, tmp_path, monkeypatch):
    require_bubblewrap()
    workspace, die_at = tmp_path / "workspace", tmp_path / "die_at"
    shutil.copytree(finished.parent, workspace, symlinks=True)
    shutil.rmtree(workspace / "stages" / "rl")
    monkeypatch.setenv("LUFFY_WORKSPACE", str(workspace))
    monkeypatch.setenv("TEST_DIE_AT", str(die_at))
    experiment = opened(workspace, "guess_number.yaml", *GAME)
    run = ExperimentRun(experiment, experiment.workspace.new_run("killed", {}))
    die_at.write_text("50")  # of about 20 in the first validation and 60 answers a step
    with pytest.raises(StageFailed, match="rl was ended by SIGKILL"):
        run.execute("rl", StageObserver())
    assert not die_at.exists()
    left = [int(pid) for pid in Path(f"{die_at}.children").read_text().split()]
    assert left  # the interpreter of the tool's code, with bubblewrap around it
    wait_until(lambda: not any(map(lives, left)))
    assert [path.name for path in (workspace / "stages/rl").glob("*/journal/*.parquet")] == ["step_000001.parquet"]
    run.execute("rl", StageObserver())
    assert_same_result(only(finished, "rl"), only(workspace / "stages", "rl"))


CHAINS = "kind: arithmetic, num_operations: [1], operations: {multiply: 1, reverse: 1}"
GAMES = "kind: guess_number, high: 7, max_turns: 3"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Experiment:
    """After its stages, of the evaluations that of the last policy alone."""
    experiment = opened(
        tmp_path_factory.mktemp("mixed"),
        "mixed_environments.yaml",
        "model.architecture={hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, "
        "max_position_embeddings: 256}",
        "base={steps: 40, batch_size: 32}",
        "execution={num_threads: 1, retries: 0, rollout_batch_size: 32, checkpoint: {rl_every: 2}}",
        "evaluation={max_response_tokens: 96, decodings: {greedy: {temperature: 0.0}}}",
        "data.max_trace_tokens=96",
        "chain=sft_then_luffy",
        f"data.train={{kind: mixture, parts: {{chains: {{source: {{{CHAINS}, num_prompts: 12, by_calculator: "
        f"[multiply]}}}}, games: {{source: {{{GAMES}, num_prompts: 12}}}}}}}}",
        f"data.corpus={{{CHAINS}, num_prompts: 256, unique: false}}",
        f"data.suites={{chains: {{{CHAINS}, num_prompts: 4}}, games: {{{GAMES}, num_prompts: 4}}}}",
        "sft={epochs: 2, batch_size: 8, optimizer: {lr: 3e-3}}",
        "rl={steps: 2, prompts_per_step: 4, max_response_tokens: 96, optimizer: {lr: 1e-3}}",
        "environment.limits={max_turns: 3, max_turn_tokens: 48}",
        "environment.scoring={weights: {answer: 1.0, tools/tool_errors: -0.1, game/found: 0.5}}",
    )
    left_out = ("evaluate_base", "evaluate_sft", "report")
    execute(experiment, *(node.name for node in experiment.nodes if node.name not in left_out))
    return experiment


def test_every_group_is_played_by_its_own_part(mixed):
    rows, parts = rows_of(mixed.plan_node("rl").directory), Counter()
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
    for row in training_rows(read_metrics(mixed.plan_node("rl").directory / METRICS_FILE)):
        assert {"reward/tools/mean", "reward/game/correct_share", "rollout/game/guesses_mean"} <= set(row)
        assert row["rollout/part/tools_mean"] == row["rollout/part/game_mean"] == 0.5
    records = list(read_samples_of(mixed.plan_node("evaluate_rl").directory))
    assert {record.suite for record in records} == {"chains", "games"}
    assert all(record.measures["part/tools"] == (record.suite == "chains") for record in records)


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ '(' + m.content + ')' if m.role == 'assistant' else m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Puts the policy's earlier turns in parentheses, which it never writes itself."""
BRANCHING = (
    "chain=rl",
    "data.train={kind: guess_number, num_prompts: 8, high: 15, max_turns: 4}",
    "data.corpus=null",
    "data.suites={games: {kind: guess_number, num_prompts: 4, high: 15, max_turns: 4}}",
    "base=null",
    "rl={steps: 3, prompts_per_step: 4, max_response_tokens: 160, optimizer: {lr: 1e-3}}",
    "environment.limits={max_turns: 3, max_turn_tokens: 8, history: branching}",
    "data.max_trace_tokens=96",
    "execution={num_threads: 1, checkpoint: {rl_every: 1, keep: 3}}",
    "tracking.samples_every=1",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The override that names a random model under the template."""
    folder = tmp_path_factory.mktemp("random")
    (folder / "brackets.jinja").write_text(TEMPLATE)
    tokenizer = build_tokenizer(["user: assistant: Game 0123456789: guess a number from 1 to 15. higher lower"] * 4)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    architecture = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    policy = Qwen2ForCausalLM(architecture)
    _teach_to_end_turns(policy, tokenizer)
    policy.save_pretrained(folder)
    return f"model={{architecture: null, path: {folder}, chat_template: {folder / 'brackets.jinja'}}}"


def branching(model: str, *overrides: str) -> ExperimentConfig:
    return load_experiment(CONFIGS / "guess_number.yaml", [*BRANCHING, model, "method=luffy", *overrides])


def _teach_to_end_turns(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """A number and the stop token, wherever a turn begins: a random model would never end one."""
    text = "user: guess<|eos|>assistant: {}<|eos|>user: higher<|eos|>assistant: {}<|eos|>"
    ids_BT = torch.tensor([tokenizer.encode(text.format(n, n + 2)) for n in range(1, 8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def upstream(model, tmp_path_factory) -> dict[str, Path]:
    return upstream_of(branching(model), tmp_path_factory.mktemp("upstream"))


@pytest.fixture(scope="module")
def undisturbed(model, upstream, tmp_path_factory) -> Path:
    """Three steps of RL; the same stage killed in the second gives the same bits."""
    out, config = tmp_path_factory.mktemp("rl") / "undisturbed", branching(model)
    with left_at(within_checkpoint(2), out) as left:
        run_rl(config, out, upstream)
    assert run_rl(config, left, upstream).resumed_from == 1
    assert_same_result(out, left)
    return out


def test_each_turn_is_learned_in_its_context(undisturbed, upstream):
    tokenizer = load_tokenizer(upstream["data"] / "tokenizer")
    metrics = read_metrics(undisturbed / METRICS_FILE)
    assert all(row["rollout/logp_gap_mean"] < 1e-4 for row in metrics)  # learned where they were sampled
    for step, row in enumerate(metrics, 1):
        rows = [row for group in RolloutJournal(undisturbed / "journal").read(step) or [] for row in group.trajectories]
        assert len(rows) == 4 * 8
        assert any(row.context_starts for row in rows if not row.is_off_policy)
        assert any(row.context_starts for row in rows if row.is_off_policy)
        for episode in rows:
            branches = episode.branches()
            assert len(branches) == episode.measures.get("turns", len(branches))
            for turn, branch in enumerate(branches):
                assert Source.ENVIRONMENT not in branch.source
                assert decode(tokenizer, branch.prompt_ids).count("assistant: (") == turn
                assert len(branch.response_ids) <= 8
        written = [source for row in rows for source in row.source if source is not Source.ENVIRONMENT]
        assert row["batch/response_tokens"] == len(written)
        assert {*written} <= {*SAMPLED, Source.OFF_POLICY}


def test_samples_show_the_turns_apart(undisturbed):
    samples = [sample for _, sample in read_samples(undisturbed / SAMPLES_FILE)]
    sample = next(each for each in samples if each.measures.get("turns", 0) > 1)
    assert sample.response.count("--- policy ---") == sample.measures["turns"]
    assert sample.response.count("Game ") == 0  # contexts are shown from where they differ


def test_sft_between_rl_steps_learns_the_authors_turns_alone(model, upstream, tmp_path, monkeypatch):
    taken: list[Trajectory] = []

    def learned(groups: Sequence[Group], demonstrations: Sequence[Trajectory], passes: int) -> dict[str, float]:
        taken.extend(demonstrations)
        return learned_metrics(groups, demonstrations, passes)

    monkeypatch.setattr(loop, "learned_metrics", learned)
    config = branching(model, "method=relift", "objective.interleaved_sft.buffer_size=2")
    run_rl(config, tmp_path / "rl", upstream)
    assert any(len(row.branches()) > 1 for row in taken)
    assert all({*branch.source} == {Source.OFF_POLICY} for row in taken for branch in row.branches())


def test_the_same_template_is_refused_where_no_history_was_chosen(model, tmp_path):
    exact = branching(model, "environment.limits.history=exact")
    with pytest.raises(DataError, match=r"set environment\.limits\.history: branching to learn each turn"):
        run_stage(exact, "prepare_data", tmp_path / "data", {})


@pytest.mark.slow
@needs_vllm
def test_vllm_samples_the_turns_that_the_trainer_learns(model, upstream, tmp_path):
    run_rl(branching(model, "rl.engine=vllm", "rl.steps=2"), tmp_path / "rl", upstream)
    assert all(row["rollout/logp_gap_mean"] < 1e-4 for row in read_metrics(tmp_path / "rl" / METRICS_FILE))
    groups = RolloutJournal(tmp_path / "rl" / "journal").read(2) or []
    rows = [row for group in groups for row in group.trajectories if not row.is_off_policy]
    assert max(len(row.branches()) for row in rows) == 3


# An environment of verifiers, through the stages' own programs; a small package takes the place of verifiers

FAKES = Path(__file__).parents[1] / "synthetic" / "fake_verifiers"
PACKAGE = f"environment: fake-environments, arguments: {{which: countdowns, num_tasks: 24}}, python: {sys.executable}"
COUNTDOWNS = [
    "chain=rl",
    "method=on_policy",
    f"data.train={{kind: verifiers, {PACKAGE}}}",
    "data.corpus={kind: guess_number, num_prompts: 256, high: 7, player: random, max_turns: 3}",
    f"data.suites={{games: {{kind: verifiers, {PACKAGE}, split: eval, equal_prompts: true}}}}",
    "model.architecture={hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, "
    "max_position_embeddings: 192}",
    "base.steps=60",
    "base.batch_size=32",
    "rl={steps: 2, prompts_per_step: 4, max_response_tokens: 96, optimizer: {lr: 1e-3}}",
    "evaluation={max_response_tokens: 96, decodings: {greedy: {temperature: 0.0}}}",
    f"environment={{kind: verifiers, {PACKAGE}, limits: {{max_turns: 3, max_turn_tokens: 8}}}}",
    "execution={num_threads: 1, retries: 0}",
]


def run_programs(workspace: Path, *names: str) -> None:
    """Make these stages by their programs, with which the interpreters of their environments end."""
    experiment = opened(workspace, "guess_number.yaml", *COUNTDOWNS)
    run = ExperimentRun(experiment, experiment.workspace.new_run("test", {}))
    for name in names:
        run.execute(name, StageObserver())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request) -> Iterator[Path]:
    """Of all workspaces. In `killed`, an environment dies once while the file `die_at` is there."""
    folder = tmp_path_factory.mktemp("workspaces")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FAKES), prepend=os.pathsep)
        patch.setenv("LUFFY_WORKSPACE", str(folder / "killed"))
        patch.setenv("TEST_DIE_AT", str(folder / "die_at"))
        request.getfixturevalue("warm_stages")  # only now, since a warm server starts no stage in another environment
        yield folder


@pytest.fixture(scope="module")
def countdowns(folder) -> Path:
    run_programs(folder / "undisturbed", "prepare_data", "base", "rl", "evaluate_rl")
    return folder / "undisturbed" / "stages"


@pytest.mark.slow
def test_reward_metrics_and_verdict_are_the_environments(countdowns):
    rows = rows_of(only(countdowns, "rl"))
    assert len(rows) == 2 * 4 * 8
    for row in rows:
        measures = dict(row["measures"])
        assert row["reward"] == measures["reward"] == measures["share"] == pytest.approx(measures["turns"] / 3)
        assert measures["num_turns"] == measures["turns"]
    assert {row["outcome"] for row in rows} <= {"correct", "wrong"}
    for row in read_metrics(only(countdowns, "rl") / METRICS_FILE):
        assert row["rollout/share_mean"] == pytest.approx(row["rollout/reward_mean"])
    records = list(read_samples_of(only(countdowns, "evaluate")))
    assert len(records) == 4
    assert all(record.correct == (record.measures["reward"] >= 1.0) for record in records)
    assert {record.grader for record in records} == {"measure"}


def hosts(folder: Path) -> list[psutil.Process]:
    """Foreign interpreters of the runs in the workspaces of a folder."""
    found = [each for each in psutil.process_iter(["cmdline"]) if "verifiers_host.py" in str(each.info["cmdline"])]
    return [each for each in found if str(folder) in str(each.environ())]


@pytest.mark.slow
def test_a_kill_of_the_foreign_interpreter_in_the_middle_of_an_answer_costs_no_bit(folder, countdowns):
    assert hosts(folder) == []
    workspace, die_at = folder / "killed", folder / "die_at"
    shutil.copytree(countdowns.parent, workspace, symlinks=True, dirs_exist_ok=True)  # caches of libraries may be there
    shutil.rmtree(workspace / "stages" / "rl")
    die_at.touch()
    with pytest.raises(StageFailed, match="the environment fake-environments of verifiers"):
        run_programs(workspace, "rl")
    assert not die_at.exists()
    assert [file.name for file in workspace.glob("stages/rl/*/journal/*.parquet")] == ["step_000001.parquet"]
    assert hosts(folder) == []
    run_programs(workspace, "rl")
    files = [f"journal/step_00000{step}.parquet" for step in (1, 2)]
    assert_same_result(only(countdowns, "rl"), only(workspace / "stages", "rl"), *files)

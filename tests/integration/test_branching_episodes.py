"""RL under a chat template that rewrites earlier turns: each turn is sampled and learned in a context of its own."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.installed import needs_vllm
from test_methods import ROOT, after_step_2, assert_resumes_from_step_1, run_rl, run_stage, upstream_of
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from luffy.config import load_experiment
from luffy.config.experiment import ExperimentConfig
from luffy.data.templates import decode, load_tokenizer
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import DataError
from luffy.pipeline.graph import build_graph
from luffy.rl import loop
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import read_metrics
from luffy.tracking.rollout_metrics import learned_metrics
from luffy.tracking.tracker import SAMPLES_FILE, read_samples
from luffy.types import SAMPLED, Group, Source, Trajectory

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{{ '(' + m.content + ')' if m.role == 'assistant' else m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Puts the policy's earlier turns in parentheses, which it never writes itself."""
GAME = [
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
]


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


@pytest.fixture(scope="module")
def config(model) -> ExperimentConfig:
    return experiment("luffy", model)


def experiment(method: str, *overrides: str) -> ExperimentConfig:
    return load_experiment(ROOT / "exp_configs/guess_number.yaml", [*GAME, f"method={method}", *overrides])


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
def upstream(config, tmp_path_factory) -> dict[str, Path]:
    return upstream_of(config, tmp_path_factory.mktemp("upstream"))


@pytest.fixture(scope="module")
def undisturbed(config, upstream, tmp_path_factory) -> Path:
    """Three steps of RL."""
    out = tmp_path_factory.mktemp("rl") / "undisturbed"
    run_rl(config, out, upstream, copy_to=after_step_2(out))
    return out


def test_each_turn_is_learned_in_its_context(undisturbed, upstream):
    tokenizer = load_tokenizer(upstream["data"] / "tokenizer")
    metrics = read_metrics(undisturbed / "metrics.jsonl")
    assert all(row["rollout/logp_gap_mean"] < 1e-4 for row in metrics)  # learned where they were sampled
    learned = [row["batch/response_tokens"] for row in metrics]
    for step in (1, 2, 3):
        groups = RolloutJournal(undisturbed / "journal").read(step) or []
        rows = [row for group in groups for row in group.trajectories]
        assert len(rows) == 4 * 8
        assert any(row.context_starts for row in rows if not row.is_off_policy)
        assert any(row.context_starts for row in rows if row.is_off_policy)
        for row in rows:
            branches = row.branches()
            assert len(branches) == row.measures.get("turns", len(branches))
            for turn, branch in enumerate(branches):
                assert Source.ENVIRONMENT not in branch.source
                assert decode(tokenizer, branch.prompt_ids).count("assistant: (") == turn
                assert len(branch.response_ids) <= 8
        written = [source for row in rows for source in row.source if source is not Source.ENVIRONMENT]
        assert learned[step - 1] == len(written)
        assert {*written} <= {*SAMPLED, Source.OFF_POLICY}


def test_an_interruption_costs_no_bit(config, undisturbed, upstream):
    assert_resumes_from_step_1(config, undisturbed, upstream)


@needs_vllm
def test_vllm_samples_the_turns_that_the_trainer_learns(model, upstream, tmp_path):
    run_rl(experiment("luffy", model, "rl.engine=vllm", "rl.steps=2"), tmp_path / "rl", upstream)
    assert all(row["rollout/logp_gap_mean"] < 1e-4 for row in read_metrics(tmp_path / "rl" / "metrics.jsonl"))
    groups = RolloutJournal(tmp_path / "rl" / "journal").read(2) or []
    rows = [row for group in groups for row in group.trajectories if not row.is_off_policy]
    assert max(len(row.branches()) for row in rows) == 3


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
    run_rl(experiment("relift", model, "objective.interleaved_sft.buffer_size=2"), tmp_path / "rl", upstream)
    assert any(len(row.branches()) > 1 for row in taken)
    for row in taken:
        assert all({*branch.source} == {Source.OFF_POLICY} for branch in row.branches())


def test_the_same_template_is_refused_where_no_history_was_chosen(config, tmp_path):
    assert config.environment is not None
    limits = config.environment.limits.model_copy(update={"history": "exact"})
    exact = config.model_copy(update={"environment": config.environment.model_copy(update={"limits": limits})})
    with pytest.raises(DataError, match=r"set environment\.limits\.history: branching to learn each turn"):
        run_stage(build_graph(exact)[0], exact, tmp_path / "data", {})

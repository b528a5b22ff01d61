"""Every method as its user runs it: real RL steps, interrupted and resumed to the same bits."""

import json
import math
import shutil
from pathlib import Path

import pytest
from reference.taught_presets import SUPERVISED
from support.kills import before_update, left_at, within_checkpoint
from support.methods import easy, experiment, run_rl, taught
from support.stages import assert_same_result, run_stage
from transformers import AutoModelForCausalLM

from luffy.config import available_presets
from luffy.config.experiment import ExperimentConfig
from luffy.config.group import DynamicSampling
from luffy.errors import DataError
from luffy.tracking.metrics import read_metrics

MECHANISMS = {
    "luffy": "traces among the rollouts",
    "exgrpo": "replay of successes",
    "relift": "SFT between RL steps",
    "pope": "hints of levels in the prompt",
    "bread": "rollouts that continue a trace",
    "critique_grpo": "a second try after feedback",
    "ampo": "traces chosen by the policy's probabilities",
    "dapo": "groups sampled until enough have variance",
    "ppo": "a critic",
    "uft": "prefixes, and a reference that follows the policy",
    "opd_topk": "a teacher's distribution",
    "mopd": "two teachers",
    "srpo": "weights by the entropy of a teacher of some rows",
    "hdpo": "rows beside the group, whose teacher sees what they were sampled with",
    "tgopd": "a teacher of the prompts that it solves",
    "sdft": "a teacher that follows the policy",
    "sdpo": "a teacher that is shown another rollout of the group",
}
"""One method for each mechanism whose state outlives a step, or is drawn within one: these make a third step."""
METHODS = [name for name in available_presets("methods") if name not in SUPERVISED]


@pytest.fixture(scope="module")
def upstream(made) -> dict[str, Path]:
    return easy(made)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_runs_and_resumes_to_the_same_bits(method, upstream, tmp_path):
    """From the checkpoint of step 1, with step 2 in the journal."""
    steps = 3 if method in MECHANISMS else 2
    config, out = experiment(method, f"rl.steps={steps}", *taught(method, upstream)), tmp_path / "undisturbed"
    # With two updates a step the fourth is within step 2.
    place = before_update(4) if method in ("luffy", "sdft") else within_checkpoint(2)
    with left_at(place, out) as left:
        run_rl(config, out, upstream)
    assert run_rl(config, left, upstream).resumed_from == 1
    assert_same_result(out, left)
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    _assert_reports_what_it_does(config, rows)


def test_a_teacher_that_does_not_fit_is_refused_before_the_first_step(upstream, tmp_path):
    """Another vocabulary of as many tokens, which a model would score without complaint; too few embeddings."""
    other, small = tmp_path / "other", tmp_path / "small"
    for teacher in (other, small):
        shutil.copytree(upstream["model"].parent / "teacher", teacher)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    first, second = sorted(words, key=words.get)[-2:]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    model = AutoModelForCausalLM.from_pretrained(small)
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows - 1)
    model.save_pretrained(small)
    for teacher, line in {
        other: r"rl\.teachers\.teacher\.path: .*tokenizer",
        small: rf"{rows - 1} tokens .* {rows};",
    }.items():
        with pytest.raises(DataError, match=line):
            given = f"rl.teachers={{teacher: {{kind: model, path: {teacher}}}}}"
            run_rl(experiment("opd", given), tmp_path / "out", upstream)
        assert not [*(tmp_path / "out").glob("journal/*")]


def test_an_adapter_has_the_frozen_model_as_its_own_teacher(upstream, tmp_path):
    """The policy's first step, whose adapter changes nothing yet, has the teacher's scores of full training."""
    adapted, full = tmp_path / "adapted", tmp_path / "full"
    config = experiment("opsd", "model.lora={rank: 4, alpha: 8}")
    with left_at(within_checkpoint(2), adapted) as left:
        run_rl(config, adapted, upstream)
    assert run_rl(config, left, upstream).resumed_from == 1
    assert_same_result(adapted, left)
    run_rl(experiment("opsd"), full, upstream)
    one, other = (
        [row["actor/distillation_reverse_kl"] for row in read_metrics(x / "metrics.jsonl")] for x in (adapted, full)
    )
    assert one[0] == pytest.approx(other[0], rel=1e-4)
    assert one[2] != pytest.approx(other[2], rel=1e-4)


@pytest.mark.parametrize("method", SUPERVISED)
def test_a_supervised_method_learns_from_traces(method, upstream, tmp_path):
    run_stage(experiment(method, "sft.epochs=6", "sft.optimizer.lr=1e-3"), "sft", tmp_path, upstream)
    # DFT's own loss, p log p, is small at both ends; what both methods raise is p.
    probabilities = [row["actor/off_policy_prob"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert sum(probabilities[-6:]) > sum(probabilities[:6])


def _assert_reports_what_it_does(config: ExperimentConfig, rows: list[dict[str, float]]) -> None:
    assert config.objective is not None
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
        assert 0 <= row["batch/zero_variance_share"] <= 1
    learned = [row for row in rows if "actor/loss" in row]
    assert learned
    for term in config.objective.terms:
        assert any(f"actor/{term.name}_loss" in row for row in learned)
        if term.gate is not None:
            assert any(f"actor/{term.name}_gated_fraction" in row for row in learned)
        if term.is_policy_gradient:
            assert any(f"actor/{term.name}_clip_fraction" in row for row in learned), term.name
            assert any(f"actor/{term.name}_weight_p50" in row for row in learned), term.name
    # Bread learns from what follows a prefix alone; entropy and divergences, by other tokens than the sampled one.
    aside = ("entropy", "divergence")
    learning = [term for term in config.objective.terms if term.select != "on_policy" and term.loss.kind not in aside]
    if config.objective.has_off_policy_rows and learning:
        assert any(0 < row.get("actor/off_policy_gradient_share", 0) <= 1 for row in learned)
    if config.objective.needs_critic:
        assert all("critic/loss" in row for row in rows)
    if config.objective.needs_teacher:
        names = [f"actor/{term.name}_reverse_kl" for term in config.objective.terms if term.needs_teacher]
        assert all("batch/taught_share" in row for row in learned)
        assert config.rl is not None
        for name in config.rl.teachers if len(config.rl.teachers) > 1 else ():
            assert any(0 < row[f"batch/taught_share_{name}"] < 1 for row in learned)
        assert all("perf/teacher_s" in row for row in learned)
        if any(getattr(teacher, "shows", None) == "start" for teacher in config.rl.teachers.values()):
            # The policy under the prompt that it sampled with: the teacher is the sampler.
            assert all(abs(row.get(name, 0.0)) < 1e-5 for row in learned for name in names)
        # A group without two right rows has no peer to show.
        assert all(any(row.get(name) for row in learned) for name in names)
    if config.objective.interleaved_sft is not None:
        assert any("actor/interleaved_loss" in row for row in rows)
    if config.objective.replay is not None:
        assert rows[-1]["batch/replayed_share"] > 0
    for name, start in config.objective.group.starts.items():
        assert any(row[f"batch/share_{name}"] > 0 for row in rows)
        if start.keep == "nearest":
            assert any(row[f"batch/solved_{name}"] > 0 and row["batch/prefix_share_mean"] > 0 for row in rows)
    if config.objective.group.lets_trainer_choose:
        chosen, others = (
            [row[f"batch/{name}_answer_probability"] for row in rows if row["batch/choice_share"]]
            for name in ("chosen", "other")
        )
        assert chosen and all(0 < low < high <= 1 for low, high in zip(others, chosen, strict=True))
    if isinstance(config.objective.group.filter, DynamicSampling):
        assert any(row["batch/kept_share"] < 1 for row in rows)

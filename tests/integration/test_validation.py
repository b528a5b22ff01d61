"""Held-out accuracy while RL and SFT train: what it leaves alone, what it says, and what a kill in its middle costs."""

import functools
import json
import signal
import sys
from collections.abc import Callable
from filecmp import cmp
from pathlib import Path

import pytest
import test_methods
from forked_program import ForkedProgram

from luffy.config import load_experiment
from luffy.data.parquet import read_prompts
from luffy.errors import UserError
from luffy.evaluation.results import read_results
from luffy.pipeline.graph import build_graph
from luffy.stages import held_out
from luffy.stages.held_out import OneVersionEngine
from luffy.stages.program import StageResult
from luffy.tracking.metrics import read_metrics, tokens_spent, without_times

COMMON = (
    "data.validation_prompts=6",
    "objective.group={size: 4, off_policy: 1}",
    "rl={steps: 5, prompts_per_step: 2, prompts_per_update: 1, max_response_tokens: 64, optimizer: {lr: 1e-3}}",
    "sft.epochs=null",
    "sft.steps=5",
    "execution.rollout_batch_size=8",
)
OF_RL = "rl.validation={every: 2, suites: [longer, retention], decoding: {temperature: 1.0, num_samples: 2}}"
OF_SFT = "sft.validation={every: 2, source: validation, decoding: {temperature: 0.7, top_p: 0.9, num_samples: 2}}"


def run_stage_of(
    stage: str, out: Path, inputs: dict[str, Path], *overrides: str, extends: Path | None = None
) -> StageResult:
    """Run one stage of the smoke experiment in this process."""
    config = load_experiment(Path("exp_configs/smoke.yaml"), [*COMMON, *overrides])
    node = next(node for node in build_graph(config) if node.stage == stage)
    named = {"held_out": inputs["data"], **inputs} if inputs else {}
    return test_methods.run_stage(node, config, out, named, extends=extends)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory) -> dict[str, Path]:
    """Data with a validation split, and a policy that answers some problems."""
    folder = tmp_path_factory.mktemp("upstream")
    run_stage_of("prepare_data", folder / "data", {})
    longer = "base={steps: 60, batch_size: 32, optimizer: {lr: 6e-3}}"
    run_stage_of("base", folder / "model", {"data": folder / "data"}, longer)
    return {"data": folder / "data", "model": folder / "model"}


def assert_same_weights(one: Path, other: Path) -> None:
    assert cmp(one / "model.safetensors", other / "model.safetensors", shallow=False)


def rows_of(out: Path) -> list[dict[str, float]]:
    return [without_times(row) for row in read_metrics(out / "metrics.jsonl")]


def unmeasured(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    trained = [row for row in rows if row["step"] > 0]
    return [{name: value for name, value in row.items() if not name.startswith("val/")} for row in trained]


@pytest.fixture(scope="module", params=["rl", "sft"])
def measured(request, upstream, tmp_path_factory) -> tuple[str, Path]:
    """A stage with validation, undisturbed."""
    out = tmp_path_factory.mktemp("measured")
    run_stage_of(request.param, out, upstream, OF_RL, OF_SFT)
    return request.param, out


@pytest.fixture(scope="module")
def shorter(upstream, tmp_path_factory) -> Callable[[str], Path]:
    """Returns a stage with validation that ends after two steps. Not to be changed."""

    @functools.cache
    def made(stage: str) -> Path:
        out = tmp_path_factory.mktemp("shorter")
        run_stage_of(stage, out, upstream, OF_RL, OF_SFT, f"{stage}.steps=2", "execution.checkpoint.sft_last=true")
        return out

    return made


@pytest.mark.slow
def test_training_is_the_same_bits_with_and_without_validation(measured, upstream, tmp_path):
    stage, on = measured
    run_stage_of(stage, tmp_path, upstream)
    assert_same_weights(tmp_path / "model", on / "model")
    rows = rows_of(on)
    assert unmeasured(rows) == rows_of(tmp_path)
    # Before training, every second step, and after the last one.
    found = [row for row in rows if "val/accuracy" in row]
    assert [row["step"] for row in found] == [0, 2, 4, 5]
    assert [row["val/weight_version"] for row in found] == [0, 2, 4, 5]
    names = ("longer", "retention") if stage == "rl" else ("validation",)
    for row in found:
        assert row["val/accuracy"] == pytest.approx(sum(row[f"val/{name}/accuracy"] for name in names) / len(names))
        for name in names:
            low, value, high = (row[f"val/{name}/{part}"] for part in ("accuracy_low", "accuracy", "accuracy_high"))
            assert 0 <= low <= value <= high <= 1
            assert row[f"val/{name}/num_problems"] == (8 if stage == "rl" else 6)


def test_the_validation_split_is_apart_from_what_is_trained_on(upstream):
    apart, trained = (read_prompts(upstream["data"] / f"{name}.parquet") for name in ("validation", "train"))
    assert len(apart) == 6
    assert not {prompt.uid for prompt in apart} & {prompt.uid for prompt in trained}
    assert not {prompt.messages for prompt in apart} & {prompt.messages for prompt in trained}


@pytest.mark.slow
def test_a_longer_run_continues_a_shorter_one_to_the_same_measurements(measured, shorter, upstream, tmp_path):
    stage, undisturbed = measured
    assert run_stage_of(stage, tmp_path, upstream, OF_RL, OF_SFT, extends=shorter(stage)).resumed_from == 2
    assert json.dumps(rows_of(tmp_path)) == json.dumps(rows_of(undisturbed))
    assert_same_weights(tmp_path / "model", undisturbed / "model")


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_a_kill_in_a_validation_resumes_to_the_same_result_and_draws_no_finished_batch_again(
    measured, upstream, tmp_path, monkeypatch
):
    """The kill comes after half of the batches of step 4; the newest checkpoint is that of step 2."""
    stage, undisturbed = measured
    batches, left_over, per_step = (10, 16, 32) if stage == "rl" else (5, 4, 12)
    out, log = tmp_path / "killed", tmp_path / "killed.log"
    arguments = [stage, str(batches), str(out), str(upstream["data"]), str(upstream["model"])]
    killed = ForkedProgram([sys.executable, "-m", "killed_validation", *arguments], log)
    assert killed.ended() == -signal.SIGKILL, log.read_text()
    drawn: list[int] = []
    generate = OneVersionEngine.generate

    def counted(engine, requests, params):
        drawn.append(len(requests))
        return generate(engine, requests, params)

    monkeypatch.setattr(OneVersionEngine, "generate", counted)
    assert run_stage_of(stage, out, upstream, OF_RL, OF_SFT).resumed_from == 2
    assert sum(drawn) == left_over + per_step  # the rest of step 4, and step 5
    assert json.dumps(rows_of(out)) == json.dumps(rows_of(undisturbed))
    assert_same_weights(out / "model", undisturbed / "model")


@pytest.mark.slow
def test_the_best_weights_are_handed_on_and_patience_ends_the_stage(shorter, upstream, tmp_path, monkeypatch):
    """The measurements are the stage's own; what they are said to be worth falls after step 2."""
    worth = {0: 0.2, 1: 0.3, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.1}
    ended = {stage: shorter(stage) for stage in ("sft", "rl")}
    real = held_out.validation_metrics
    monkeypatch.setattr(
        held_out, "validation_metrics", lambda rows, step: real(rows, step) | {"val/accuracy": worth[step]}
    )
    for stage in ("sft", "rl"):
        out = tmp_path / stage
        validation = f"{stage}.validation={{every: 1, suites: [retention], keep_best: {{}}, patience: 2}}"
        run_stage_of(stage, out, upstream, validation)
        assert [row["step"] for row in rows_of(out)] == [0, 1, 2, 3, 4]
        assert [folder.name for folder in (out / "best").iterdir()] == ["step_000002"]
        assert_same_weights(out / "model", out / "best/step_000002")
        assert_same_weights(out / "model", ended[stage] / "model")
        # A second attempt of the finished training finds the same best step in its metrics.
        run_stage_of(stage, out, upstream, validation)
        assert_same_weights(out / "model", ended[stage] / "model")
    assert read_results(tmp_path / "rl/validation/step_000002.json").rows[0].num_problems == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("sft.validation={every: 2, suites: [longer], max_response_tokens: 120}",), "lower validation.max"),
        (("sft.steps=null", "sft.epochs=1", "sft.validation={every: 9, suites: [longer]}"), "above the stage's 2"),
    ],
)
def test_what_only_the_data_can_tell_is_refused_before_training(overrides, line, upstream, tmp_path):
    with pytest.raises(UserError, match=line):
        run_stage_of("sft", tmp_path, upstream, *overrides)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_limit_of_tokens_ends_a_stage_as_if_it_had_fewer_steps(stage, upstream, tmp_path):
    """The limit lies within step 3; the weights after it are measured and handed on."""
    run_stage_of(stage, tmp_path / "short", upstream, OF_RL, OF_SFT, f"{stage}.steps=3")
    spent = [tokens_spent(row) for row in rows_of(tmp_path / "short") if row["step"] > 0]
    limit = f"{stage}.max_tokens={round(sum(spent[:2]) + spent[2] / 2)}"
    run_stage_of(stage, tmp_path / "limited", upstream, OF_RL, OF_SFT, limit)
    assert rows_of(tmp_path / "limited") == rows_of(tmp_path / "short")
    assert_same_weights(tmp_path / "limited/model", tmp_path / "short/model")
    # Begun again, the finished training takes no further step.
    run_stage_of(stage, tmp_path / "limited", upstream, OF_RL, OF_SFT, limit)
    assert rows_of(tmp_path / "limited") == rows_of(tmp_path / "short")

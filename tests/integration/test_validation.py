"""Held-out accuracy while RL and SFT train: what it leaves alone, what it says, and what a kill in its middle costs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE_S
from safetensors.torch import load_file

from luffy.config import load_experiment
from luffy.data.parquet import read_prompts
from luffy.evaluation.held_out_accuracy import OneVersionEngine
from luffy.evaluation.results import read_results
from luffy.pipeline.chain.graph import build_graph
from luffy.pipeline.machine.events import EventWriter
from luffy.stages import base, prepare_data, rl, sft
from luffy.stages.program import StageContext, StageResult
from luffy.tracking.metrics import read_metrics, without_times

STAGES = {"prepare_data": prepare_data, "base": base, "sft": sft, "rl": rl}
COMMON = ("data.validation_prompts=6", "rl.steps=5", "sft.epochs=null", "sft.steps=5", "execution.rollout_batch_size=8")
CHOOSING = (
    "rl.validation={every: 2, suites: [longer, retention], decoding: {temperature: 1.0, num_samples: 2}, "
    "keep_best: {metric: retention/mean_tokens, mode: min}}",
)
OF_RL = "rl.validation={every: 2, suites: [longer, retention]}"
OF_SFT = "sft.validation={every: 2, source: validation, decoding: {temperature: 0.7, top_p: 0.9, num_samples: 2}}"


def run_stage_of(stage: str, out: Path, inputs: dict[str, Path], *overrides: str) -> StageResult:
    """Run one stage of the smoke experiment in this process."""
    config = load_experiment(Path("exp_configs/smoke.yaml"), [*COMMON, *overrides])
    node = next(node for node in build_graph(config) if node.stage == stage)
    out.mkdir(parents=True, exist_ok=True)
    events = EventWriter(out / "events.jsonl")
    named = {"held_out": inputs["data"], **inputs} if inputs else {}
    context = StageContext(out, named, "key", stage, config.execution, config.tracking, events)
    return STAGES[stage].run(node.settings, context)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data with a validation split, and a policy that answers some problems."""
    folder = tmp_path_factory.mktemp("upstream")
    run_stage_of("prepare_data", folder / "data", {})
    longer = "base={steps: 60, batch_size: 32, optimizer: {lr: 6e-3}}"
    run_stage_of("base", folder / "model", {"data": folder / "data"}, longer)
    return {"data": folder / "data", "model": folder / "model"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def rows_of(out: Path) -> list[dict[str, float]]:
    return [without_times(row) for row in read_metrics(out / "metrics.jsonl")]


def unmeasured(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    trained = [row for row in rows if row["step"] > 0]
    return [{name: value for name, value in row.items() if not name.startswith("val/")} for row in trained]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "validation"), [("rl", OF_RL), ("sft", OF_SFT)])
def test_training_is_the_same_bits_with_and_without_validation(
    stage: str, validation: str, upstream: dict[str, Path], tmp_path: Path
) -> None:
    run_stage_of(stage, tmp_path / "off", upstream)
    run_stage_of(stage, tmp_path / "on", upstream, validation)
    assert_same_weights(tmp_path / "off/model", tmp_path / "on/model")
    measured = rows_of(tmp_path / "on")
    assert unmeasured(measured) == rows_of(tmp_path / "off")
    # Before training, every second step, and after the last one.
    found = [row for row in measured if "val/accuracy" in row]
    assert [row["step"] for row in found] == [0, 2, 4, 5]
    assert [row["val/weight_version"] for row in found] == [0, 2, 4, 5]
    names = ("longer", "retention") if stage == "rl" else ("validation",)
    for row in found:
        assert row["val/accuracy"] == pytest.approx(sum(row[f"val/{name}/accuracy"] for name in names) / len(names))
        for name in names:
            low, value, high = (row[f"val/{name}/{part}"] for part in ("accuracy_low", "accuracy", "accuracy_high"))
            assert 0 <= low <= value <= high <= 1
            assert row[f"val/{name}/num_problems"] == (8 if stage == "rl" else 6)


def test_the_validation_split_is_apart_from_what_is_trained_on(upstream: dict[str, Path]) -> None:
    apart, trained = (read_prompts(upstream["data"] / f"{name}.parquet") for name in ("validation", "train"))
    assert len(apart) == 6
    assert not {prompt.uid for prompt in apart} & {prompt.uid for prompt in trained}
    assert not {prompt.messages for prompt in apart} & {prompt.messages for prompt in trained}


@pytest.mark.slow
def test_a_kill_in_a_validation_resumes_to_the_same_result_and_draws_no_finished_batch_again(
    upstream: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four batches a measurement; the kill comes in the third of step 4, the checkpoint is that of step 2."""
    out, plain = tmp_path / "killed", tmp_path / "undisturbed"
    arguments = ["10", str(out), str(upstream["data"]), str(upstream["model"])]
    script = Path(__file__).with_name("killed_validation.py")
    killed = subprocess.run([sys.executable, script, *arguments], timeout=PATIENCE_S)
    assert killed.returncode == -signal.SIGKILL
    run_stage_of("rl", plain, upstream, *CHOOSING)
    drawn: list[int] = []
    generate = OneVersionEngine.generate

    def counted(engine, requests, params):
        drawn.append(len(requests))
        return generate(engine, requests, params)

    monkeypatch.setattr(OneVersionEngine, "generate", counted)
    assert run_stage_of("rl", out, upstream, *CHOOSING).resumed_from == 2
    assert sum(drawn) == 16 + 32  # the rest of step 4, and step 5
    assert json.dumps(rows_of(out)) == json.dumps(rows_of(plain))
    assert_same_weights(out / "model", plain / "model")


@pytest.mark.slow
def test_the_best_weights_are_handed_on_and_patience_ends_the_stage(
    upstream: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurements are the stage's own; what they are said to be worth falls after step 2."""
    worth = {0: 0.2, 1: 0.3, 2: 0.5, 3: 0.4, 4: 0.5, 5: 0.1}
    measured = "luffy.stages.held_out.validation_metrics"
    real = sys.modules["luffy.stages.held_out"].validation_metrics
    monkeypatch.setattr(measured, lambda rows, step: real(rows, step) | {"val/accuracy": worth[step]})
    for stage in ("sft", "rl"):
        out = tmp_path / stage
        validation = f"{stage}.validation={{every: 1, suites: [retention], keep_best: {{}}, patience: 2}}"
        run_stage_of(stage, out, upstream, validation)
        assert [row["step"] for row in rows_of(out)] == [0, 1, 2, 3, 4]
        assert [folder.name for folder in (out / "best").iterdir()] == ["step_000002"]
        assert_same_weights(out / "model", out / "best/step_000002")
        run_stage_of(stage, tmp_path / f"{stage}_2", upstream, f"{stage}.steps=2")
        assert_same_weights(out / "model", tmp_path / f"{stage}_2/model")
        # A second attempt of the finished training finds the same best step in its metrics.
        run_stage_of(stage, out, upstream, validation)
        assert_same_weights(out / "model", tmp_path / f"{stage}_2/model")
    assert read_results(tmp_path / "rl/validation/step_000002.json").rows[0].num_problems == 8

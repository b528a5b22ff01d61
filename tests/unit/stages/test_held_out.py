"""A measurement comes from the weights of one version, and the best measured weights outlive every kill."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic.result_rows import result_row, sample_record

from luffy.config.evaluation import KeepBestConfig, ValidationConfig
from luffy.errors import CheckpointError, LuffyError
from luffy.evaluation.results import EvaluationResults, write_results
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.stages.held_out import OneVersionEngine, measure_suites, validation_metrics
from luffy.stages.training_span import HeldOut
from luffy.types import FinishReason

PARAMS = SamplingParams(1.0, 4, (), stop=("\n",))


class Versions:
    """An engine whose weights change while it answers."""

    def __init__(self, *versions):
        self._versions = versions
        self.asked = []

    def generate(self, requests, params):
        self.asked.append(params)
        length = len(self._versions)
        return [Completion((1,) * length, (0.0,) * length, FinishReason.LENGTH, self._versions) for _ in requests]


def test_an_answer_of_other_weights_is_refused_and_stop_texts_are_left_to_the_client():
    requests, engine = [RolloutRequest((1,), seed=0)], Versions(3, 3)
    assert len(OneVersionEngine(engine, 3).generate(requests, PARAMS)) == 1
    assert engine.asked == [replace(PARAMS, stop=())]
    with pytest.raises(LuffyError, match=r"version 3 .* \[3, 4\]"):
        OneVersionEngine(Versions(3, 4), 3).generate(requests, PARAMS)


def row_of(suite, *verdicts):
    return result_row([sample_record(suite, f"p{i}", right) for i, right in enumerate(verdicts)], 0.95)


def test_the_mean_is_over_suites_of_any_size_and_a_kill_while_a_measurement_tidied_up_leaves_no_answers(tmp_path):
    rows = row_of("small", *[True] * 2), row_of("large/b", *[False] * 6)
    metrics = validation_metrics(rows, version=7)
    expected = {
        "val/accuracy": 0.5, "val/weight_version": 7, "val/small/accuracy": 1.0, "val/large/b/accuracy": 0.0,
        "val/small/num_problems": 2, "val/large/b/num_problems": 6,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected
    assert 0 < metrics["val/small/accuracy_low"] < metrics["val/small/accuracy_high"] == 1
    write_results(tmp_path / "step_000003.json", EvaluationResults(checkpoint="step 3", confidence=0.95, rows=rows))
    answers = tmp_path / "step_000003.answers.jsonl"
    answers.write_bytes(b"")
    asker = None  # not needed: everything is measured
    assert measure_suites(asker, [], 0.95, tmp_path, 3) == rows
    assert not answers.exists()


class Training:
    """A run in `out` that measures every step, and exports its current step as a model folder."""

    def __init__(self, out: Path, patience: int | None = None, **keep_best: object) -> None:
        self.out = out
        schedule = ValidationConfig(
            every=1, source="validation", keep_best=KeepBestConfig(**keep_best), patience=patience
        )
        self.held_out = HeldOut(self.export, out, 9, schedule, lambda step: {"val/accuracy": self.value})
        self.step, self.value = 0, 0.0

    def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(str(self.step))

    def measure(self, step: int, value: float) -> None:
        self.step, self.value = step, value
        self.held_out.measure(step)

    def checkpoint(self) -> None:
        """With the metrics up to there."""
        folder = self.out / f"checkpoints/step_{self.step:06d}"
        folder.mkdir(parents=True)
        (folder / "COMPLETE").touch()
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, "val/accuracy": self.value}) + "\n")

    def best(self) -> str:
        self.held_out.export(self.out / "model")
        return (self.out / "model/weights").read_text()

    def kept(self) -> list[str]:
        return sorted(folder.name for folder in (self.out / "best").iterdir())


@pytest.mark.parametrize(("mode", "best", "is_over"), [("max", "1", True), ("min", "3", False)])
def test_the_earliest_of_equals_wins_and_mode_decides_what_is_better(tmp_path, mode, best, is_over):
    training = Training(tmp_path, patience=2, mode=mode)
    for step, value in ((0, 0.3), (1, 0.5), (2, 0.5), (3, 0.1)):
        training.measure(step, value)
    assert (training.best(), training.held_out.is_over) == (best, is_over)


def test_older_weights_stay_until_a_checkpoint_lies_behind_the_better_ones(tmp_path):
    training = Training(tmp_path)
    training.measure(1, 0.2)
    training.checkpoint()
    training.measure(2, 0.4)
    # Killed now, the stage goes back to step 1, where step 1 was the best.
    assert training.kept() == ["step_000001", "step_000002"]
    again = Training(tmp_path)
    assert again.best() == "1"
    again.measure(2, 0.4)
    again.checkpoint()
    again.measure(3, 0.3)
    assert again.kept() == ["step_000002"]


def test_a_kill_in_an_export_leaves_no_half_model_and_deleted_weights_are_named(tmp_path):
    training = Training(tmp_path)
    training.measure(1, 0.2)
    (tmp_path / "best/incoming").mkdir()
    (tmp_path / "best/incoming/torn").touch()
    training.measure(2, 0.4)
    assert training.kept() == ["step_000002"] and not (tmp_path / "best/step_000002/torn").exists()
    training.checkpoint()
    (tmp_path / "best/step_000002/weights").rename(tmp_path / "weights")
    (tmp_path / "best/step_000002").rmdir()
    with pytest.raises(CheckpointError, match="step_000002: the best weights are gone"):
        Training(tmp_path).best()

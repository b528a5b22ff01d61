"""The best measured weights outlive every kill: what a resumed stage needs is still there."""

from pathlib import Path

import pytest

from luffy.config.evaluation import KeepBestConfig
from luffy.errors import CheckpointError
from luffy.stages.best_model import BestModel


class Weights:
    """Exports its current step as a model folder."""

    step = 0

    def export(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(str(self.step))


def observe(best, weights, step, value):
    weights.step = step
    best.observe(step, {"val/accuracy": value})


def opened(out, weights, rows=(), **config):
    history = [{"step": float(step), "val/accuracy": value} for step, value in rows]
    return BestModel(out, KeepBestConfig(**config), weights.export, history)


def kept(out):
    return sorted(folder.name for folder in (out / "best").iterdir())


def checkpoint(out, step):
    folder = out / f"checkpoints/step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "COMPLETE").touch()


def test_the_earliest_of_equals_wins_and_mode_decides_what_is_better(tmp_path):
    weights = Weights()
    best, least = opened(tmp_path / "a", weights), opened(tmp_path / "b", weights, mode="min")
    for out in (tmp_path / "a", tmp_path / "b"):
        out.mkdir()
    for step, value in ((0, 0.3), (1, 0.5), (2, 0.5), (3, 0.1)):
        observe(best, weights, step, value)
        observe(least, weights, step, value)
    assert (best.step, best.num_later) == (1, 2)
    assert (least.step, least.num_later) == (3, 0)
    best.hand_on(tmp_path / "model")
    assert (tmp_path / "model/weights").read_text() == "1"


def test_older_weights_stay_until_a_checkpoint_lies_behind_the_better_ones(tmp_path):
    weights = Weights()
    best = opened(tmp_path, weights)
    observe(best, weights, 1, 0.2)
    checkpoint(tmp_path, 1)
    observe(best, weights, 2, 0.4)
    # Killed now, the stage goes back to step 1, where step 1 was the best.
    assert kept(tmp_path) == ["step_000001", "step_000002"]
    again = opened(tmp_path, weights, [(1, 0.2)])
    assert again.step == 1
    observe(again, weights, 2, 0.4)
    checkpoint(tmp_path, 2)
    observe(again, weights, 3, 0.3)
    assert kept(tmp_path) == ["step_000002"]


def test_a_kill_in_an_export_leaves_no_half_model(tmp_path):
    weights = Weights()
    best = opened(tmp_path, weights)
    observe(best, weights, 1, 0.2)
    (tmp_path / "best/incoming").mkdir()
    (tmp_path / "best/incoming/torn").touch()
    observe(best, weights, 2, 0.4)
    assert kept(tmp_path) == ["step_000002"] and not (tmp_path / "best/step_000002/torn").exists()


def test_deleted_weights_are_named(tmp_path):
    best = opened(tmp_path, Weights(), [(1, 0.2)])
    with pytest.raises(CheckpointError, match="step_000001: the best weights are gone"):
        best.hand_on(tmp_path / "model")

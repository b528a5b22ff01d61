"""Supervised training as a stage runs it: what a kill after an early end leaves to do."""

import dataclasses
from pathlib import Path

import pytest
import torch
from reference.gradient_case import execution, tiny_model, trajectories
from reference.sft_case import PLAN
from safetensors.torch import load_file
from synthetic.answered_stage import messages_of, stage_context
from synthetic.arithmetic import tiny_tokenizer

from luffy.config import load_experiment
from luffy.config.settings import SFTSettings
from luffy.pipeline.graph import build_graph
from luffy.stages.supervised_run import run_supervised
from luffy.tracking.metrics import GpuHours, read_metrics, without_times
from luffy.training.checkpoint import CheckpointStore
from luffy.training.policy import Policy
from luffy.training.ranks import LocalRanks
from luffy.training.supervised import SupervisedRank

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"
LASTING = dataclasses.replace(PLAN, saves_last=True)


@pytest.fixture(scope="module")
def settings() -> SFTSettings:
    found = next(node.settings for node in build_graph(load_experiment(SMOKE)) if node.stage == "sft")
    assert isinstance(found, SFTSettings)
    return found


def train(settings: SFTSettings, folder: Path, max_tokens: int) -> None:
    """Train a tiny model, or resume it, in `folder / "out"`."""
    tiny_tokenizer().save_pretrained(folder / "data" / "tokenizer")
    out = folder / "out"
    context = stage_context("sft", out, {"data": folder / "data"})
    policy = Policy(tiny_model(), LASTING.optimizer, execution(), "float32")
    ranks = LocalRanks(SupervisedRank(policy, LASTING, CheckpointStore(out, 2), pad_id=0))
    rows = trajectories("sft")[0]
    settings = settings.model_copy(update={"sft": settings.sft.model_copy(update={"max_tokens": max_tokens})})
    run_supervised(settings, context, ranks, rows, LASTING, GpuHours(out))


def test_a_kill_after_max_tokens_has_ended_training_costs_no_further_step(settings, tmp_path, monkeypatch):
    train(settings, tmp_path / "whole", max_tokens=1)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(SupervisedRank, "export", kill)
        train(settings, tmp_path / "killed", max_tokens=1)
    train(settings, tmp_path / "killed", max_tokens=1)
    whole, resumed = (tmp_path / name / "out" for name in ("whole", "killed"))
    logged = [[without_times(row) for row in read_metrics(out / "metrics.jsonl")] for out in (whole, resumed)]
    assert logged[0] == logged[1]
    assert [row["step"] for row in logged[0]] == [1]
    found = [load_file(out / "model" / "model.safetensors") for out in (whole, resumed)]
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
    assert messages_of(resumed) == ["sft.max_tokens ended training after step 1 of 4"] * 2


def kill(rank: SupervisedRank, folder: Path) -> None:
    raise KeyboardInterrupt

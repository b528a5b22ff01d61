"""Supervised training against the reference, and what a kill leaves."""

import contextlib
import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference.gradient_case import (
    adamw_step,
    execution,
    reference_optimizer,
    reference_rows,
    relative_l2,
    tiny_model,
    trajectories,
)
from reference.losses import REFERENCES, forward
from reference.ray_case import weights_in
from reference.rows import evaluate
from reference.sft_case import ENDS_AFTER, PHASED, PLAN, sft

from luffy.tracking.metrics import without_times
from luffy.training.batching import stream_indices
from luffy.training.checkpoint import CheckpointStore
from luffy.training.policy import Policy
from luffy.training.ranks import LocalRanks
from luffy.training.supervised import SupervisedPlan, SupervisedRank, SupervisedTrainer

RATES = (1.0, 0.75, 0.5, 0.25)
"""Of the first step's."""


def trainer_of(policy: Policy, store: CheckpointStore, plan: SupervisedPlan = PLAN) -> SupervisedTrainer:
    return SupervisedTrainer(plan, LocalRanks(SupervisedRank(policy, plan, store, pad_id=0)))


@pytest.mark.parametrize(("preset", "plan"), [("sft", PLAN), ("psft", PHASED)])
def test_training_equals_the_reference_step_by_step(preset: str, plan: SupervisedPlan, tmp_path: Path) -> None:
    model, rows = tiny_model(), trajectories("sft")[0]
    policy = Policy(copy.deepcopy(model), plan.optimizer, execution(micro_batch_tokens=40), "float32")
    seen: list[dict[str, float]] = []
    trainer_of(policy, CheckpointStore(tmp_path, 1), plan).train(rows, 0, lambda _, metrics: seen.append(metrics))
    model64 = copy.deepcopy(model).double()
    optimizer = reference_optimizer(model64)
    for step, rate in enumerate(plan.optimizer.lr * share for share in RATES):
        chosen = [rows[i] for i in stream_indices(len(rows), step * PLAN.batch_size, PLAN.batch_size, PLAN.seed)]
        if step % plan.steps_per_phase == 0:
            old64 = copy.deepcopy(model64)
        with torch.no_grad():
            written = reference_rows(preset, chosen, range(len(chosen)), [evaluate(old64, row)[0] for row in chosen])
        loss = REFERENCES[preset]([forward(model64, row) for row in written])
        loss.backward()
        assert seen[step]["actor/loss"] == pytest.approx(float(loss), rel=1e-5)
        assert seen[step]["actor/lr"] == pytest.approx(rate)
        adamw_step(model64, optimizer, rate)
    found = {name: parameter.detach() for name, parameter in policy.causal_lm.named_parameters()}
    assert relative_l2(found, {name: p.detach() for name, p in model64.named_parameters()}) < 1e-5


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch takes is afterwards as before."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_deterministic_kernels_are_taken_before_training_and_give_the_same_bits_on_a_cpu(own_kernels, tmp_path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    usual, steps = (sft(tmp_path / "model", tmp_path / str(kind), deterministic=kind) for kind in (False, True))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert [without_times(step) for step in steps] == [without_times(step) for step in usual]
    one, other = (weights_in(tmp_path / str(kind) / "model") for kind in (False, True))
    assert all(weight.equal(other[name]) for name, weight in one.items())


def test_a_step_is_told_before_its_checkpoint_counts(tmp_path: Path) -> None:
    """Killed between the two, a resumed run tells the step again; the other way round it would never be told."""
    store = CheckpointStore(tmp_path, 1)

    def kill_at_two(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise KeyboardInterrupt

    policy = Policy(tiny_model(), PLAN.optimizer, execution(), "float32")
    with pytest.raises(KeyboardInterrupt):
        trainer_of(policy, store).train(trajectories("sft")[0], 0, kill_at_two)
    assert store.newest() is None


def test_a_phase_that_was_cut_off_is_taken_again_to_the_same_bits(tmp_path: Path) -> None:
    """Killed after step 3 of phases of two: the newest checkpoint is step 2's, although each step is due for one."""
    plan, rows = replace(PHASED, checkpoint_every=1), trajectories("sft")[0]

    def kill(step: int, metrics: dict[str, float]) -> None:
        if step == ENDS_AFTER:
            raise KeyboardInterrupt

    weights = []
    for name, start, ends in (("whole", 0, False), ("cut", 0, True), ("cut", ENDS_AFTER - 1, False)):
        store = CheckpointStore(tmp_path / name, 1)
        policy = Policy(tiny_model(), plan.optimizer, execution(), "float32")
        with pytest.raises(KeyboardInterrupt) if ends else contextlib.nullcontext():
            trainer_of(policy, store, plan).train(rows, start, kill if ends else lambda *_: None)
        assert not ends or store.newest() == ENDS_AFTER - 1
        weights.append([parameter.detach().clone() for parameter in policy.causal_lm.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(weights[0], weights[2], strict=True))

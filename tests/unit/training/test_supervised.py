"""Supervised training against the reference, and what a kill leaves."""

import copy
from pathlib import Path

import pytest
import torch
from reference.gradient_case import (
    OPTIMIZER,
    adamw_step,
    execution,
    reference_optimizer,
    reference_rows,
    relative_l2,
    tiny_model,
    trajectories,
)
from reference.losses import REFERENCES, forward
from reference.sft_case import PLAN

from luffy.training.batching import stream_indices
from luffy.training.checkpoint import CheckpointStore
from luffy.training.policy import Policy
from luffy.training.ranks import LocalRanks
from luffy.training.supervised import SupervisedRank, SupervisedTrainer

RATES = tuple(OPTIMIZER.lr * share for share in (1.0, 0.75, 0.5, 0.25))


def trainer_of(policy: Policy, store: CheckpointStore) -> SupervisedTrainer:
    return SupervisedTrainer(PLAN, LocalRanks(SupervisedRank(policy, PLAN, store, pad_id=0)))


def test_training_equals_the_reference_step_by_step(tmp_path: Path) -> None:
    model, rows = tiny_model(), trajectories("sft")[0]
    policy = Policy(copy.deepcopy(model), PLAN.optimizer, execution(micro_batch_tokens=40), "float32")
    seen: list[dict[str, float]] = []
    trainer_of(policy, CheckpointStore(tmp_path, 1)).train(rows, 0, lambda _, metrics: seen.append(metrics))
    model64 = copy.deepcopy(model).double()
    optimizer = reference_optimizer(model64)
    for step, rate in enumerate(RATES):
        chosen = [rows[i] for i in stream_indices(len(rows), step * PLAN.batch_size, PLAN.batch_size, PLAN.seed)]
        written = reference_rows("sft", chosen, range(len(chosen)), [torch.zeros(0)] * len(chosen))
        loss = REFERENCES["sft"]([forward(model64, row) for row in written])
        loss.backward()
        assert seen[step]["actor/loss"] == pytest.approx(float(loss), rel=1e-5)
        assert seen[step]["actor/lr"] == pytest.approx(rate)
        adamw_step(model64, optimizer, rate)
    found = {name: parameter.detach() for name, parameter in policy.causal_lm.named_parameters()}
    assert relative_l2(found, {name: p.detach() for name, p in model64.named_parameters()}) < 1e-5


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

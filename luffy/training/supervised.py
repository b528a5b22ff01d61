"""Supervised training on (prompt, response) pairs, for the stages `base` and `sft`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from luffy.config.objective import TermConfig
from luffy.config.training import OptimizerConfig
from luffy.objectives.schedules import schedule_multiplier
from luffy.objectives.step import objective_at
from luffy.seeds import derive_seed
from luffy.training.batching import collate
from luffy.training.checkpoint import CheckpointStore
from luffy.training.memory_use import peak_memory
from luffy.training.policy import Policy
from luffy.training.sampler import batch_indices
from luffy.types import FinishReason, Outcome, Source, Trajectory

OnStep = Callable[[int, dict[str, float]], None]
"""Called after each optimizer step with its number (from 1) and its metrics."""


@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    """Length, batch size and objective of supervised training."""

    steps: int
    batch_size: int
    optimizer: OptimizerConfig
    terms: tuple[TermConfig, ...]
    checkpoint_every: int
    seed: int


def demonstration(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Trajectory:
    """A (prompt, response) pair as a trajectory of off-policy tokens."""
    length = len(response_ids)
    return Trajectory(
        prompt_ids=tuple(prompt_ids),
        response_ids=tuple(response_ids),
        source=(Source.OFF_POLICY,) * length,
        logp_behavior=(float("nan"),) * length,
        weight_version=(-1,) * length,
        reward=0.0,
        outcome=Outcome.CORRECT,
        finish_reason=FinishReason.STOP,
    )


def train_supervised(
    policy: Policy,
    examples: Sequence[Trajectory],
    plan: SupervisedPlan,
    checkpoints: CheckpointStore,
    pad_id: int,
    start: int,
    on_step: OnStep,
) -> None:
    """Train from step `start` (0, or that of the checkpoint just loaded) to the plan's end."""
    for step in range(start + 1, plan.steps + 1):
        began = time.perf_counter()
        torch.manual_seed(derive_seed(plan.seed, "train", step))  # for models with dropout
        rows = [examples[i] for i in batch_indices(len(examples), plan.batch_size, step - 1, plan.seed)]
        batch = collate(rows, torch.zeros(len(rows)), pad_id)
        lr = plan.optimizer.lr * schedule_multiplier(plan.optimizer.schedule, step - 1, plan.steps)
        metrics = policy.update(batch, objective_at(plan.terms, step, plan.steps, batch.input_ids_BT.shape[1]), lr)
        seconds = time.perf_counter() - began
        metrics["batch/num_rows"] = float(len(rows))
        metrics["batch/response_tokens"] = float(sum(len(row.response_ids) for row in rows))
        metrics["perf/tokens_per_s"] = float(batch.attention_mask_BT.sum()) / seconds
        metrics["perf/step_s"] = seconds
        metrics |= peak_memory()
        # Metrics before the checkpoint: a run killed in between repeats the step and loses no metrics.
        on_step(step, metrics)
        if step % plan.checkpoint_every == 0 and step < plan.steps:
            checkpoints.save({"policy": policy.engine}, step)

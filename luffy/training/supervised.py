"""Supervised training on (prompt, response) pairs, for the stages `base` and `sft`.

`SupervisedRank` runs in this process or in a Ray actor; `SupervisedTrainer` drives the ranks, wherever they run. The
rows of a step and the weight of each token do not depend on the number of ranks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from luffy.config.execution import ExecutionConfig
from luffy.config.model import DType, LoRAConfig
from luffy.config.terms import TermConfig
from luffy.config.training import OptimizerConfig
from luffy.objectives.losses import check_custom
from luffy.objectives.schedules import objective_at, schedule_multiplier
from luffy.seeds import derive_seed
from luffy.stop_request import StoppedOnRequest, stop_is_requested
from luffy.training.batching import Shard, branches_of, collate, shard_rows, stream_indices
from luffy.training.checkpoint import CheckpointStore
from luffy.training.deepspeed_engine import load_to_train
from luffy.training.policy import Policy, check_fits
from luffy.training.policy_model import Adapter
from luffy.training.ranks import Ranks, call_everywhere, take_deterministic_kernels
from luffy.training.update_metrics import PartTimes, process_metrics
from luffy.types import FinishReason, Outcome, Source, TrainBatch, Trajectory

OnStep = Callable[[int, dict[str, float]], bool]
"""Called after each optimizer step with its number (from 1) and its metrics; returns whether it was the last."""


@dataclass(frozen=True, slots=True)
class SupervisedPlan:
    """Length, batch size and objective of supervised training."""

    steps: int
    batch_size: int
    optimizer: OptimizerConfig
    terms: tuple[TermConfig, ...]
    checkpoint_every: int
    seed: int
    saves_last: bool = False
    """Whether the last step is followed by a checkpoint, too."""
    steps_per_phase: int = 1
    """Optimizer steps whose ratios are to the policy before the first of them."""


@dataclass(frozen=True, slots=True)
class SupervisedSpec:
    """Everything a rank is built from; it is sent to other processes and machines."""

    plan: SupervisedPlan
    execution: ExecutionConfig
    dtype: DType
    model: Path
    out: Path
    """The stage's directory, for checkpoints, on a file system shared by all ranks."""
    pad_id: int
    lora: LoRAConfig | None = None
    """None: all weights are trained."""

    def open_rank(self) -> "SupervisedRank":
        """Load the model and prepare it for training; a collective call."""
        if self.execution.deterministic:
            take_deterministic_kernels()
        model, plan = load_to_train(self.model, self.dtype, self.execution), self.plan
        adapter = None if self.lora is None else Adapter(model, self.lora, derive_seed(plan.seed, "adapter"))
        policy = Policy(model, plan.optimizer, self.execution, self.dtype, adapter=adapter)
        return SupervisedRank(policy, self.plan, CheckpointStore(self.out, self.execution.checkpoint.keep), self.pad_id)


class SupervisedRank:
    """One rank, in an existing process group (`luffy.training.ranks`)."""

    def __init__(self, policy: Policy, plan: SupervisedPlan, checkpoints: CheckpointStore, pad_id: int) -> None:
        check_custom(plan.terms)
        self.policy = policy
        self._plan = plan
        self._checkpoints = checkpoints
        self._pad_id = pad_id
        self._phase: list[TrainBatch] = []
        """The batches of the phase's steps still to be taken, with log-probabilities under the old policy."""

    def check_fits(self, longest: int) -> None:
        check_fits(self.policy.causal_lm, longest, "the longest example")

    def begin_phase(self, shards: Sequence[Shard]) -> None:
        """Score the rows of the coming steps under the current policy, from then on the old one."""
        batches = [self._batch(shard) for shard in shards]
        self._phase = [replace(batch, logp_old_BT=self.policy.logprobs(batch)) for batch in batches]

    def take_step(self, shard: Shard, step: int) -> dict[str, float]:
        plan = self._plan
        # For models with dropout: a different mask on each rank.
        torch.manual_seed(derive_seed(plan.seed, "train", step, dist.get_rank()))
        lr = plan.optimizer.lr * schedule_multiplier(plan.optimizer.schedule, step - 1, plan.steps)
        # Without `mode: constant` (`SupervisedObjectiveConfig`), nothing is divided by a length of responses.
        objective = objective_at(plan.terms, step, plan.steps, max_response_tokens=1)
        batch = self._phase.pop(0) if self._phase else self._batch(shard)
        times = PartTimes()
        with times.part("update"):
            metrics = self.policy.update(batch, objective, lr)
        if self.policy.flops is not None:
            times.count(self.policy.flops.training(batch.row_lengths, batch.num_scored))
        return metrics | times.metrics() | process_metrics()

    def _batch(self, shard: Shard) -> TrainBatch:
        return collate(shard.rows, torch.ones(len(shard.rows)), self._pad_id, episodes=shard.episodes)

    def save(self, step: int, is_extra: bool) -> None:
        """Write the checkpoint of `step`; `is_extra`: it is not on the schedule."""
        self._checkpoints.save({"policy": self.policy.engine}, step, is_extra=is_extra)

    def restore(self, step: int) -> None:
        self._checkpoints.load({"policy": self.policy.engine}, step)

    def export(self, folder: Path) -> None:
        self.policy.export(folder)


def demonstration(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    source: Sequence[Source] = (),
    context_starts: Sequence[int] = (),
) -> Trajectory:
    """A (prompt, response) pair as a trajectory of off-policy tokens, or of those in `source`."""
    length = len(response_ids)
    return Trajectory(
        prompt_ids=tuple(prompt_ids),
        response_ids=tuple(response_ids),
        source=tuple(source) or (Source.OFF_POLICY,) * length,
        logp_behavior=(float("nan"),) * length,
        weight_version=(-1,) * length,
        reward=0.0,
        outcome=Outcome.CORRECT,
        finish_reason=FinishReason.STOP,
        context_starts=tuple(context_starts),
    )


class SupervisedTrainer:
    """All ranks as one."""

    def __init__(self, plan: SupervisedPlan, ranks: Ranks[SupervisedRank]) -> None:
        self._plan = plan
        self._ranks = ranks

    @property
    def num_gpus(self) -> int:
        return self._ranks.num_gpus

    def train(self, examples: Sequence[Trajectory], start: int, on_step: OnStep) -> None:
        """Train from step `start` (0, or the step of a checkpoint) to the end of the plan, or until `on_step` says so.

        Raises DataError when an example is longer than the model's context, StoppedOnRequest after a checkpoint where
        the process was asked to end.
        """
        longest = max(row.num_tokens for row in branches_of(examples)[0])
        call_everywhere(self._ranks, SupervisedRank.check_fits, longest)
        if start:
            self.restore(start)
        for step in range(start + 1, self._plan.steps + 1):
            # Metrics before the checkpoint: a run killed in between repeats the step and loses no metrics.
            is_last = on_step(step, self._take_step(examples, step)) or step == self._plan.steps
            # Between phases, since the old policy is not saved.
            every, phase = self._plan.checkpoint_every, self._plan.steps_per_phase
            ends_phase = step % phase == 0
            is_due = self._plan.saves_last if is_last else ends_phase and step // every > (step - phase) // every
            is_stopped = not is_last and ends_phase and stop_is_requested()
            if is_due or is_stopped:
                call_everywhere(self._ranks, SupervisedRank.save, step, not is_due)
            if is_last:
                return
            if is_stopped:
                raise StoppedOnRequest(f"step {step} of {self._plan.steps} is saved")

    def restore(self, step: int) -> None:
        call_everywhere(self._ranks, SupervisedRank.restore, step)

    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face model folder (safetensors)."""
        call_everywhere(self._ranks, SupervisedRank.export, folder)

    def _take_step(self, examples: Sequence[Trajectory], step: int) -> dict[str, float]:
        began, plan = time.perf_counter(), self._plan
        if plan.steps_per_phase > 1 and (step - 1) % plan.steps_per_phase == 0:
            last = min(step + plan.steps_per_phase - 1, plan.steps)
            phase = [self._shards(self._rows(examples, coming)) for coming in range(step, last + 1)]
            self._ranks.call(SupervisedRank.begin_phase, [(of_rank,) for of_rank in zip(*phase, strict=True)])
        rows = self._rows(examples, step)
        shards = self._shards(rows)
        metrics = self._ranks.call(SupervisedRank.take_step, [(shard, step) for shard in shards])[0]
        seconds = time.perf_counter() - began
        return metrics | {
            "batch/num_rows": float(len(rows)),
            "batch/response_tokens": float(sum(row.num_learnable for row in rows)),
            "perf/tokens_per_s": sum(row.num_tokens for row in rows) / seconds,
            "perf/step_s": seconds,
        }

    def _rows(self, examples: Sequence[Trajectory], step: int) -> list[Trajectory]:
        size = self._plan.batch_size
        return [examples[i] for i in stream_indices(len(examples), (step - 1) * size, size, self._plan.seed)]

    def _shards(self, rows: Sequence[Trajectory]) -> list[Shard]:
        return shard_rows(rows, self._ranks.num_ranks)

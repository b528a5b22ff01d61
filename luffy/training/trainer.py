"""The trainer: ranks that hold the policy (and its critic, reference and teacher), always called together.

`TrainerRank` runs in this process or in a Ray actor; `Trainer` drives the ranks, wherever they run.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from luffy.broadcast_group import BroadcastGroup
from luffy.config.execution import ExecutionConfig
from luffy.config.rl_teacher import ModelTeacher, ServedTeacher
from luffy.config.settings import RLSettings
from luffy.pipeline.machine.flops import ModelFlops
from luffy.seeds import derive_seed
from luffy.training.adapter import Adapter
from luffy.training.batching import Shard, collate, shard_groups, shard_rows
from luffy.training.checkpoint import CheckpointStore
from luffy.training.critic import Critic
from luffy.training.deepspeed_engine import load_to_train
from luffy.training.learner import Learner, Metrics
from luffy.training.model_folder import load_causal_lm
from luffy.training.policy import (
    DistillationTeacher,
    FrozenPolicy,
    MovingReference,
    Policy,
    ReferencePolicy,
    ServedScores,
    TokenScorer,
    UnadaptedPolicy,
    check_fits,
)
from luffy.training.policy_model import refuse_processed_logits
from luffy.training.rank_calls import Ranks, call_everywhere
from luffy.types import Group, Trajectory


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """Model folder and longest row of the teacher of `rl.teacher`."""

    folder: Path
    """Its model folder; the initial policy's where the policy is its own teacher."""
    longest: int
    """Largest number of tokens of a prompt that it is shown, with its response."""


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Everything a rank is built from; it is sent to other processes and machines."""

    settings: RLSettings
    execution: ExecutionConfig
    model: Path
    """Folder of the initial policy."""
    out: Path
    """The stage's directory, for checkpoints, on a file system shared by all ranks."""
    longest: int
    """Largest number of tokens of a prompt with its response."""
    pad_id: int
    teacher: TeacherSpec | None = None
    """None: the objective needs none, or it is served elsewhere."""

    def open_rank(self) -> "TrainerRank":
        """Load the models and prepare them for training; a collective call."""
        return TrainerRank(self)


class TrainerRank:
    """One rank, in an existing process group (`luffy.training.ranks`)."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._learner = _learner(spec)
        self.version = 0
        """Number of RL steps that the current weights were trained for."""
        self.broadcast_group: BroadcastGroup | None = None
        """The group in which rank 0 sends its weights to the engines, once formed."""
        self.broadcast_failures = 0
        """How often in a row none formed although all engines lived."""
        self._checkpoints = CheckpointStore(spec.out, spec.execution.checkpoint.keep)

    @property
    def policy(self) -> Policy:
        return self._learner.policy

    def learn(self, shard: Shard, step: int) -> Metrics:
        """Take the optimizer steps of RL step `step` (from 1)."""
        self._seed_dropout("train", step)
        metrics = self._learner.learn(shard, step)
        self.version = step
        return metrics

    def sft_step(self, shard: Shard, step: int) -> Metrics:
        """One SFT step after RL step `step`."""
        self._seed_dropout("train sft", step)  # there may have been nothing to learn in the RL step
        return self._learner.sft_step(shard, step)

    def follow(self, step: int) -> None:
        """Refresh a reference that follows the policy, if it is due after RL step `step`."""
        if self._moving is not None:
            self._moving.follow(step)

    def entropies(self, rows: Sequence[Trajectory]) -> list[float]:
        """Mean entropy (nats) of each row's response under the current weights."""
        batch = collate(rows, torch.zeros(len(rows)), self._spec.pad_id)
        mask_BT = batch.response_mask_BT
        entropy_B = (self.policy.entropies(batch) * mask_BT).sum(dim=-1) / mask_BT.sum(dim=-1).clamp(min=1)
        return entropy_B.tolist()

    def save(self, step: int, state: Mapping[str, object], is_extra: bool) -> None:
        """Write the checkpoint of `step`; `state` is the stage's own state."""
        own = {"learner": dict(self._learner.state()), "stage": dict(state)}
        self._checkpoints.save(self._engines, step, own, self._frozen, is_extra=is_extra)

    def restore(self, step: int) -> dict[str, Any]:
        """Restore the checkpoint of `step`; returns the stage's own state."""
        state = self._checkpoints.load(self._engines, step, self._frozen)
        if self._moving is not None:
            self._moving.publish()
        self.version = step
        self._learner.restore(state["learner"])
        return state["stage"]

    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face model folder."""
        self.policy.export(folder)

    def free_cache(self) -> None:
        """Return torch's cached GPU memory to the driver, for an engine that shares the GPU."""
        torch.cuda.empty_cache()

    def _seed_dropout(self, purpose: str, step: int) -> None:
        """For models with dropout: a different mask on each rank, whatever was computed before."""
        torch.manual_seed(derive_seed(self._spec.settings.seed, purpose, step, dist.get_rank()))

    @property
    def _moving(self) -> MovingReference | None:
        reference = self._learner.reference
        return reference if isinstance(reference, MovingReference) else None

    @property
    def _frozen(self) -> dict[str, Mapping[str, Tensor]]:
        return {} if self._moving is None else {"reference": self._moving.state}

    @property
    def _engines(self) -> dict[str, deepspeed.DeepSpeedEngine]:
        critic = self._learner.critic
        return {"policy": self.policy.engine} | ({} if critic is None else {"critic": critic.engine})


class Trainer:
    """All ranks as one: shards the rows over them, and returns the results of rank 0 where all are equal."""

    def __init__(self, settings: RLSettings, ranks: Ranks[TrainerRank]) -> None:
        self._settings = settings
        self._ranks = ranks

    @property
    def num_gpus(self) -> int:
        """GPUs that training and its engines hold."""
        return self._ranks.num_gpus

    def learn(self, groups: Sequence[Group], step: int) -> Metrics:
        """Take the optimizer steps of RL step `step` (from 1); returns their number and their mean metrics."""
        if not groups:
            return {"batch/optimizer_steps": 0.0}
        settings = self._settings
        shards = shard_groups(
            groups,
            settings.objective.advantage,
            settings.rl.updates_per_pass,
            self._ranks.num_ranks,
            seed=derive_seed(settings.seed, "updates", step),
            passes=settings.rl.passes,
        )
        metrics = self._ranks.call(TrainerRank.learn, [(shard, step) for shard in shards])[0]
        return metrics | {"batch/optimizer_steps": float(len(shards[0].updates))}

    def sft_step(self, rows: Sequence[Trajectory], step: int) -> Metrics:
        """One SFT step on demonstrations, after RL step `step`."""
        shards = shard_rows(rows, self._ranks.num_ranks)
        return self._ranks.call(TrainerRank.sft_step, [(shard, step) for shard in shards])[0]

    def finish_step(self, step: int) -> None:
        """Refresh a reference that follows the policy; called after RL step `step`, even if it made no update."""
        if self._settings.rl.reference is not None:
            call_everywhere(self._ranks, TrainerRank.follow, step)

    def entropies(self, rows: Sequence[Trajectory]) -> list[float]:
        """Mean entropy (nats) of each row's response under the current weights; every rank computes all of them."""
        return call_everywhere(self._ranks, TrainerRank.entropies, rows)

    def save(self, step: int, state: Mapping[str, object], *, is_extra: bool = False) -> None:
        """Write the checkpoint of `step`; `state` is plain JSON, which `restore` returns.

        `is_extra`: it is not on the schedule, and is deleted after the next checkpoint.
        """
        call_everywhere(self._ranks, TrainerRank.save, step, state, is_extra)

    def restore(self, step: int) -> dict[str, Any]:
        """Restore the checkpoint of `step`; returns the stage's own state."""
        return call_everywhere(self._ranks, TrainerRank.restore, step)

    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face model folder (safetensors)."""
        call_everywhere(self._ranks, TrainerRank.export, folder)


def _learner(spec: TrainerSpec) -> Learner:
    """The policy and, where the objective needs them, a critic, a reference policy and a teacher."""
    settings, execution = spec.settings, spec.execution
    rl, objective = settings.rl, settings.objective

    def start() -> PreTrainedModel:
        return load_to_train(spec.model, settings.dtype, execution)

    model = start()
    check_fits(model, spec.longest, "a prompt and its response")
    lora = settings.lora
    adapter = None if lora is None else Adapter(model, lora, derive_seed(settings.seed, "adapter"))
    policy = Policy(model, rl.optimizer, execution, settings.dtype, rl.temperature, adapter)

    @functools.cache  # one copy for a reference and for a policy that teaches itself
    def initial() -> ReferencePolicy:
        return FrozenPolicy(start(), execution, rl.temperature) if adapter is None else UnadaptedPolicy(policy)

    def reference() -> ReferencePolicy:
        if rl.reference is None:
            return initial()
        whole = load_causal_lm(spec.model, settings.dtype)
        return MovingReference(policy, FrozenPolicy(whole, execution, rl.temperature), rl.reference)

    return Learner(
        policy=policy,
        objective=objective,
        rl=rl,
        pad_id=spec.pad_id,
        critic=None if rl.critic is None else Critic(start(), rl.critic, execution, settings.dtype),
        reference=reference() if objective.needs_reference else None,
        teacher=_teacher(spec, policy, initial) if objective.needs_teacher else None,
    )


def _teacher(spec: TrainerSpec, policy: Policy, initial: Callable[[], ReferencePolicy]) -> TokenScorer:
    """The teacher: the model that `rl.teacher` names, the initial policy, or scores from servers."""
    settings, teacher = spec.settings, spec.settings.rl.teacher
    if isinstance(teacher, ServedTeacher):
        return ServedScores()
    assert teacher is not None and spec.teacher is not None
    if not isinstance(teacher, ModelTeacher):
        check_fits(
            policy.causal_lm, spec.teacher.longest, "a prompt with its trace in rl.teacher.prompt, and a response,"
        )
        return DistillationTeacher(initial(), policy.flops, spec.pad_id)
    model = load_to_train(spec.teacher.folder, teacher.dtype or settings.dtype, spec.execution)
    check_fits(model, spec.teacher.longest, "a prompt and its response, scored by the teacher of rl.teacher,")
    refuse_processed_logits(model)
    frozen = FrozenPolicy(model, spec.execution, settings.rl.temperature)
    return DistillationTeacher(frozen, ModelFlops.of_config(model.config.to_dict()), spec.pad_id)

"""Training in an RL step: optimizer steps on the shard of a rank, the rank that holds its models, all ranks as one.

`Learner` takes the optimizer steps. `TrainerRank` runs in this process or in a Ray actor; `Trainer` drives the ranks,
wherever they run, and always calls all of them together.

Shape legend: `B` rows, `T` tokens, `P` prompts (groups).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from luffy.config.execution import ExecutionConfig
from luffy.config.group import AdvantageConfig, GeneralizedAdvantage
from luffy.config.objective import ObjectiveConfig
from luffy.config.settings import RLSettings
from luffy.config.terms import ConstantValue, TermConfig
from luffy.config.training import (
    ModelTeacher,
    MovingReferenceConfig,
    OptimizerConfig,
    RLConfig,
    SelfTeacher,
    ServedTeacher,
)
from luffy.objectives.advantages import check_advantages, generalized_advantages, whiten
from luffy.objectives.losses import check_custom
from luffy.objectives.schedules import StepObjective, objective_at, schedule_multiplier
from luffy.seeds import derive_seed
from luffy.training.batching import Shard, collate, shard_groups, shard_rows, take_rows
from luffy.training.checkpoint import CheckpointStore
from luffy.training.critic import Critic
from luffy.training.deepspeed_engine import load_to_train
from luffy.training.model_folder import load_causal_lm
from luffy.training.policy import (
    FrozenPolicy,
    MovingReference,
    Policy,
    ReferencePolicy,
    UnadaptedPolicy,
    check_fits,
)
from luffy.training.policy_model import Adapter, refuse_processed_logits
from luffy.training.ranks import Ranks, call_everywhere, sum_over_ranks, take_deterministic_kernels
from luffy.training.teachers import DistillationTeacher, ServedScores, Teachers, TokenScorer
from luffy.training.update_metrics import ModelFlops, PartTimes, process_metrics
from luffy.types import Group, TrainBatch, Trajectory

Metrics = dict[str, float]


def batch_of(shard: Shard, config: AdvantageConfig, pad_id: int, critic: Critic | None = None) -> TrainBatch:
    """This rank's rows as one batch with advantages per token; with a critic, also its values and targets."""
    accuracy_B = torch.tensor([shard.accuracies[group] for group in shard.groups], dtype=torch.float64)
    batch = collate(shard.rows, torch.tensor(shard.advantages), pad_id, accuracy_B, shard.episodes)
    if isinstance(config, GeneralizedAdvantage):
        assert critic is not None, "GAE needs a critic"
        value_BT = critic.values(batch)
        reward_B = torch.tensor([row.reward for row in shard.rows], dtype=torch.float64)
        advantage_BT, return_BT = generalized_advantages(reward_B, value_BT, batch.response_mask_BT, config)
        if config.whiten:
            advantage_BT = whiten(advantage_BT, batch.response_mask_BT, sum_over_ranks)
        batch = replace(batch, advantage_BT=advantage_BT.float(), value_old_BT=value_BT, return_BT=return_BT.float())
    if config.zero_truncated:
        device = batch.advantage_BT.device
        is_whole_B = torch.tensor([not row.is_truncated for row in shard.rows], device=device)
        batch = replace(batch, advantage_BT=batch.advantage_BT * is_whole_B.unsqueeze(-1))
    return batch


@dataclass(slots=True)
class Learner:
    """Takes the optimizer steps of RL steps, for the policy and the critic if there is one."""

    policy: Policy
    objective: ObjectiveConfig
    rl: RLConfig
    pad_id: int
    critic: Critic | None = None
    reference: ReferencePolicy | None = None
    teachers: Teachers | None = None

    def __post_init__(self) -> None:
        assert (self.critic is not None) == self.objective.needs_critic
        assert (self.reference is not None) == self.objective.needs_reference
        assert (self.teachers is not None) == self.objective.needs_teacher
        sft = self.objective.interleaved_sft
        check_custom((*self.objective.terms, *(() if sft is None else sft.terms)))

    def learn(self, shard: Shard, step: int) -> Metrics:
        """Take the optimizer steps of RL step `step` (from 1), none without groups; returns their mean metrics.

        A collective call: each rank passes its shard of the step.
        """
        if not shard.updates:
            return {}
        times = PartTimes()
        with times.part("batch"):  # with a critic, also its values
            batch = batch_of(shard, self.objective.advantage, self.pad_id, self.critic)
        if len(shard.updates) > 1:
            # With several updates the policy moves away from the old one; with a single update they are equal.
            with times.part("logp_old"):
                batch = replace(batch, logp_old_BT=self.policy.logprobs(batch))
        if self.reference is not None:
            with times.part("reference"):
                batch = replace(batch, logp_ref_BT=self.reference.logprobs(batch))
        if self.teachers is not None:
            with times.part("teacher"):
                batch = self.teachers.teach(batch, shard.rows)
        with times.part("update"):
            history = [self._update(take_rows(batch, rows), step, update) for update, rows in enumerate(shard.updates)]
        teaching = 0.0 if self.teachers is None else self.teachers.forward_flops(shard.rows)
        times.count(self._flops(batch, len(shard.updates), step) + teaching)
        means = {}
        for name in dict.fromkeys(name for metrics in history for name in metrics):
            values = [metrics[name] for metrics in history if name in metrics]
            means[name] = sum(values) / len(values)
        # The share of zero-variance groups: all their tokens, on every rank, have advantage 0.
        learned_P, group_B = torch.zeros(len(shard.accuracies)), torch.tensor(shard.groups, dtype=torch.long)
        learned_P.index_add_(0, group_B, (batch.advantage_BT * batch.response_mask_BT).any(dim=-1).float())
        means["batch/zero_advantage_share"] = float((sum_over_ranks(learned_P) == 0).double().mean())
        return means | times.metrics() | process_metrics()

    def sft_step(self, shard: Shard, step: int) -> Metrics:
        """One SFT step on demonstrations between the RL steps (`objective.interleaved_sft`)."""
        config = self.objective.interleaved_sft
        assert config is not None
        batch = collate(shard.rows, torch.zeros(len(shard.rows)), self.pad_id, episodes=shard.episodes)
        lr = self._lr(self.rl.optimizer, step, update=self.rl.updates_per_step - 1)
        metrics = self.policy.update(batch, self._objective_at(config.terms, step), lr)
        kept = [name for name in ("loss", "grad_norm", "lr", "skipped_update") if f"actor/{name}" in metrics]
        return {f"actor/interleaved_{name}": metrics[f"actor/{name}"] for name in kept}

    def _update(self, batch: TrainBatch, step: int, update: int) -> Metrics:
        metrics: Metrics = {}
        if self.critic is not None and self.rl.critic is not None:
            metrics |= self.critic.update(batch, self._lr(self.rl.critic.optimizer, step, update))
        if not self._critic_warms_up(step):
            objective = self._objective_at(self.objective.terms, step)
            metrics |= self.policy.update(batch, objective, self._lr(self.rl.optimizer, step, update))
            metrics |= {
                f"actor/{term.name}_coefficient": coefficient
                for term, coefficient in zip(objective.terms, objective.coefficients, strict=True)
                if not isinstance(term.coefficient, ConstantValue)
            }
        return metrics

    def _flops(self, batch: TrainBatch, num_updates: int, step: int) -> float:
        """Operations of this shard's part of the step; 0 where they are not counted."""
        flops, lengths = self.policy.flops, batch.row_lengths
        if flops is None:
            return 0.0
        scorings, passes = int(num_updates > 1) + int(self.reference is not None), self.rl.passes
        total = scorings * flops.forward(lengths, batch.num_scored)
        if not self._critic_warms_up(step):
            total += passes * flops.training(lengths, batch.num_scored)
        if self.critic is not None:
            critic = replace(flops, adapter_weights=None)
            total += critic.forward(lengths, num_scored=0) + passes * critic.training(lengths, num_scored=0)
        return total

    def _critic_warms_up(self, step: int) -> bool:
        return self.rl.critic is not None and step <= self.rl.critic.warmup_steps

    def _objective_at(self, terms: Sequence[TermConfig], step: int) -> StepObjective:
        return objective_at(terms, step, self.rl.steps, self.rl.max_response_tokens, self.rl.teachers)

    def _lr(self, optimizer: OptimizerConfig, step: int, update: int) -> float:
        """Learning rate of an optimizer step, by its position among all optimizer steps of the stage."""
        num_updates = self.rl.updates_per_step
        place, total = (step - 1) * num_updates + update, self.rl.steps * num_updates
        return optimizer.lr * schedule_multiplier(optimizer.schedule, place, total)


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """Model folder and longest row of a teacher of `rl.teachers`."""

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
    teachers: Mapping[str, TeacherSpec] = field(default_factory=dict)
    """By name, those that are not served elsewhere."""

    def open_rank(self) -> "TrainerRank":
        """Load the models and prepare them for training; a collective call."""
        if self.execution.deterministic:
            take_deterministic_kernels()
        return TrainerRank(self)


class TrainerRank:
    """One rank, in an existing process group (`luffy.training.ranks`)."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._spec = spec
        self._learner = _learner(spec)
        self.version = 0
        """Number of RL steps that the current weights were trained for."""
        self._checkpoints = CheckpointStore(spec.out, spec.execution.checkpoint.keep)

    @property
    def policy(self) -> Policy:
        return self._learner.policy

    def learn(self, shard: Shard, step: int) -> Metrics:
        self._seed_dropout("train", step)
        metrics = self._learner.learn(shard, step)
        self.version = step
        return metrics

    def sft_step(self, shard: Shard, step: int) -> Metrics:
        self._seed_dropout("train sft", step)  # there may have been nothing to learn in the RL step
        return self._learner.sft_step(shard, step)

    def follow(self, step: int) -> None:
        """Refresh what follows the policy, where it is due after RL step `step`."""
        for moving in self._moving.values():
            moving.follow(step)

    def entropies(self, rows: Sequence[Trajectory]) -> list[float]:
        """Mean entropy (nats) of each row's response under the current weights."""
        batch = collate(rows, torch.zeros(len(rows)), self._spec.pad_id)
        mask_BT = batch.response_mask_BT
        entropy_B = (self.policy.entropies(batch) * mask_BT).sum(dim=-1) / mask_BT.sum(dim=-1).clamp(min=1)
        return entropy_B.tolist()

    def mean_probabilities(self, rows: Sequence[Trajectory]) -> list[float]:
        """Mean probability of each row's learnable tokens under the current weights; every row has some."""
        batch = collate(rows, torch.zeros(len(rows)), self._spec.pad_id)
        mask_BT = batch.response_mask_BT
        p_BT = torch.where(mask_BT, self.policy.logprobs(batch).double().exp(), 0.0)
        return (p_BT.sum(dim=-1) / mask_BT.sum(dim=-1)).tolist()

    def save(self, step: int, state: Mapping[str, object], is_extra: bool) -> None:
        self._checkpoints.save(self._engines, step, {"stage": dict(state)}, self._frozen, is_extra=is_extra)

    def restore(self, step: int) -> dict[str, Any]:
        state = self._checkpoints.load(self._engines, step, self._frozen)
        for moving in self._moving.values():
            moving.publish()
        self.version = step
        return state["stage"]

    def export(self, folder: Path) -> None:
        self.policy.export(folder)

    def free_cache(self) -> None:
        """Return torch's cached GPU memory to the driver, for an engine that shares the GPU."""
        torch.cuda.empty_cache()

    def _seed_dropout(self, purpose: str, step: int) -> None:
        """For models with dropout: a different mask on each rank, whatever was computed before."""
        torch.manual_seed(derive_seed(self._spec.settings.seed, purpose, step, dist.get_rank()))

    @property
    def _moving(self) -> dict[str, MovingReference]:
        """What follows the policy, by its name in checkpoints."""
        models: dict[str, ReferencePolicy | Policy | None] = {"reference": self._learner.reference}
        scorers = () if self._learner.teachers is None else self._learner.teachers.scorers
        for name, scorer in zip(self._spec.settings.rl.teachers, scorers, strict=True):
            models[f"teacher_{name}"] = scorer.model if isinstance(scorer, DistillationTeacher) else None
        return {name: model for name, model in models.items() if isinstance(model, MovingReference)}

    @property
    def _frozen(self) -> dict[str, Mapping[str, Tensor]]:
        return {name: moving.state for name, moving in self._moving.items()}

    @property
    def _engines(self) -> dict[str, deepspeed.DeepSpeedEngine]:
        critic = self._learner.critic
        return {"policy": self.policy.engine} | ({} if critic is None else {"critic": critic.engine})


class Trainer:
    """All ranks as one: shards the rows over them, and returns the results of rank 0 where all are equal."""

    def __init__(self, settings: RLSettings, ranks: Ranks[TrainerRank]) -> None:
        """ConfigError for advantages of the user's own that cannot be used, before anything is sampled."""
        check_advantages(settings.objective.advantage)
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
        """Refresh what follows the policy; called after RL step `step`, even if it made no update."""
        if self._settings.rl.following:
            call_everywhere(self._ranks, TrainerRank.follow, step)

    def entropies(self, rows: Sequence[Trajectory]) -> list[float]:
        """Mean entropy (nats) of each row's response under the current weights; every rank computes all of them."""
        return call_everywhere(self._ranks, TrainerRank.entropies, rows)

    def mean_probabilities(self, rows: Sequence[Trajectory]) -> list[float]:
        """Mean probability of each row's learnable tokens under the current weights; every rank computes all of
        them."""
        return call_everywhere(self._ranks, TrainerRank.mean_probabilities, rows)

    def save(self, step: int, state: Mapping[str, object], *, is_extra: bool = False) -> None:
        """Write the checkpoint of `step`; `state` is plain JSON, which `restore` returns.

        `is_extra`: it is not on the schedule, and is deleted after the next checkpoint.
        """
        call_everywhere(self._ranks, TrainerRank.save, step, state, is_extra)

    def restore(self, step: int) -> dict[str, Any]:
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

    def following(config: MovingReferenceConfig) -> MovingReference:
        whole = load_causal_lm(spec.model, settings.dtype)
        return MovingReference(policy, FrozenPolicy(whole, execution, rl.temperature), config)

    def self_teacher(config: SelfTeacher) -> ReferencePolicy | Policy:
        if config.follows is not None:
            return following(config.follows)
        return initial() if config.weights == "start" else policy

    def reference() -> ReferencePolicy:
        return initial() if rl.reference is None else following(rl.reference)

    return Learner(
        policy=policy,
        objective=objective,
        rl=rl,
        pad_id=spec.pad_id,
        critic=None if rl.critic is None else Critic(start(), rl.critic, execution, settings.dtype),
        reference=reference() if objective.needs_reference else None,
        teachers=_teachers(spec, policy, self_teacher) if objective.needs_teacher else None,
    )


def _teachers(
    spec: TrainerSpec,
    policy: Policy,
    self_teacher: Callable[[SelfTeacher], ReferencePolicy | Policy],
) -> Teachers:
    """The teachers: models that `rl.teachers` names, the policy itself, and scores from servers."""
    settings, objective = spec.settings, spec.settings.objective
    scorers, divergence, own = list[TokenScorer](), objective.divergence, policy.causal_lm.config.vocab_size
    top_k = None if divergence is None else 0 if divergence.over == "policy" else divergence.top_k
    num_models = sum(isinstance(teacher, ModelTeacher) for teacher in settings.rl.teachers.values())
    for name, teacher in settings.rl.teachers.items():
        if isinstance(teacher, ServedTeacher):
            scorers.append(ServedScores())
            continue
        given, where = spec.teachers[name], f"rl.teachers.{name}"
        if isinstance(teacher, SelfTeacher):
            shown = f"a prompt with its trace in {where}.prompt, and a response,"
            check_fits(policy.causal_lm, given.longest, shown)
            scored, flops = self_teacher(teacher), policy.flops
        else:
            model = load_to_train(given.folder, teacher.dtype or settings.dtype, spec.execution)
            check_fits(model, given.longest, f"a prompt and its response, scored by {where},")
            refuse_processed_logits(model)
            scored = FrozenPolicy(model, spec.execution, settings.rl.temperature, own, takes_turns=num_models > 1)
            flops = ModelFlops.of_config(model.config.to_dict())
            policy.choose_among(model.config.vocab_size)
        scorers.append(DistillationTeacher(scored, flops, spec.pad_id, top_k, objective.needs_teacher_entropy))
    return Teachers(scorers, policy, divergence)

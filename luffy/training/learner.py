"""Training in an RL step on one rank: optimizer steps on its shard of the graded groups.

Shape legend: `B` rows, `T` tokens, `P` prompts (groups).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from luffy.config.objective import (
    AdvantageConfig,
    ConstantValue,
    GeneralizedAdvantage,
    ObjectiveConfig,
    TermConfig,
)
from luffy.config.training import OptimizerConfig, RLConfig
from luffy.objectives.gae import generalized_advantages, whiten
from luffy.objectives.normalisation import SumOverRanks
from luffy.objectives.schedules import AdaptiveCoefficients, StepObjective, objective_at, schedule_multiplier
from luffy.training.batching import Shard, collate, take_rows
from luffy.training.critic import Critic
from luffy.training.policy import Policy, ReferencePolicy, TokenScorer
from luffy.training.update_metrics import PartTimes, peak_memory
from luffy.types import TrainBatch, Trajectory

Metrics = dict[str, float]


def batch_of(
    shard: Shard, config: AdvantageConfig, pad_id: int, sum_over_ranks: SumOverRanks, critic: Critic | None = None
) -> TrainBatch:
    """This rank's rows as one batch with advantages per token; with a critic, also its values and targets."""
    accuracy_B = torch.tensor([shard.accuracies[group] for group in shard.groups], dtype=torch.float64)
    batch = collate(shard.rows, torch.tensor(shard.advantages), pad_id, accuracy_B, shard.episodes)
    if isinstance(config, GeneralizedAdvantage):
        assert critic is not None, "GAE needs a critic"
        batch = _with_gae(batch, shard.rows, config, critic, sum_over_ranks)
    scale_BT = _advantage_scale(batch, shard.rows, config)
    return replace(batch, advantage_BT=batch.advantage_BT * scale_BT)


def _with_gae(
    batch: TrainBatch,
    rows: Sequence[Trajectory],
    config: GeneralizedAdvantage,
    critic: Critic,
    sum_over_ranks: SumOverRanks,
) -> TrainBatch:
    value_BT = critic.values(batch)
    reward_B = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    advantage_BT, return_BT = generalized_advantages(reward_B, value_BT, batch.response_mask_BT, config)
    if config.whiten:
        advantage_BT = whiten(advantage_BT, batch.response_mask_BT, sum_over_ranks)
    return replace(batch, advantage_BT=advantage_BT.float(), value_old_BT=value_BT, return_BT=return_BT.float())


def _advantage_scale(batch: TrainBatch, rows: Sequence[Trajectory], config: AdvantageConfig) -> Tensor:
    scale_BT = torch.where(batch.is_off_policy_BT, config.off_policy_scale, config.on_policy_scale)
    if config.zero_truncated:
        scale_BT[[row.is_truncated for row in rows]] = 0.0
    return scale_BT


class Learner:
    """Takes the optimizer steps of RL steps, for the policy and the critic if there is one."""

    def __init__(
        self,
        policy: Policy,
        objective: ObjectiveConfig,
        rl: RLConfig,
        pad_id: int,
        critic: Critic | None = None,
        reference: ReferencePolicy | None = None,
        teacher: TokenScorer | None = None,
    ) -> None:
        assert (critic is not None) == objective.needs_critic
        assert (reference is not None) == objective.needs_reference
        assert (teacher is not None) == objective.needs_teacher
        self.policy = policy
        self.critic = critic
        self.reference = reference
        self._teacher = teacher
        self._objective = objective
        self._rl = rl
        self._pad_id = pad_id
        self._adaptive = AdaptiveCoefficients(objective.terms)

    def learn(self, shard: Shard, step: int) -> Metrics:
        """Take the optimizer steps of RL step `step` (from 1), none without groups; returns their mean metrics.

        A collective call: each rank passes its shard of the step.
        """
        if not shard.updates:
            return {}
        times, mesh = PartTimes(), self.policy.mesh
        with times.part("batch"):  # with a critic, also its values
            batch = batch_of(shard, self._objective.advantage, self._pad_id, mesh.sum_over_shards, self.critic)
        if len(shard.updates) > 1:
            # With several updates the policy moves away from the old one; with a single update they are equal.
            with times.part("logp_old"):
                batch = replace(batch, logp_old_BT=self.policy.logprobs(batch))
        if self.reference is not None:
            with times.part("reference"):
                batch = replace(batch, logp_ref_BT=self.reference.logprobs(batch))
        if self._teacher is not None:
            with times.part("teacher"):
                batch = replace(batch, logp_teacher_BT=self._teacher.logprobs(batch, shard.rows))
        with times.part("update"):
            history = [self._update(take_rows(batch, rows), step, update) for update, rows in enumerate(shard.updates)]
        teaching = 0.0 if self._teacher is None else self._teacher.forward_flops(shard.rows)
        times.count((self._flops(batch, len(shard.updates), step) + teaching) / mesh.slices)
        shares = {"batch/zero_advantage_share": _zero_variance_share(shard, batch, mesh.sum_over_shards)}
        return _mean_over_updates(history) | shares | times.metrics() | peak_memory()

    def sft_step(self, shard: Shard, step: int) -> Metrics:
        """One SFT step on demonstrations between the RL steps (`objective.interleaved_sft`)."""
        config = self._objective.interleaved_sft
        assert config is not None
        batch = collate(shard.rows, torch.zeros(len(shard.rows)), self._pad_id, episodes=shard.episodes)
        lr = config.lr_scale * self._lr(self._rl.optimizer, step, update=self._rl.updates_per_step - 1)
        metrics = self.policy.update(batch, self._objective_at(config.terms, step), lr)
        kept = [name for name in ("loss", "grad_norm", "lr", "skipped_update") if f"actor/{name}" in metrics]
        return {f"actor/interleaved_{name}": metrics[f"actor/{name}"] for name in kept}

    def state(self) -> Mapping[str, float]:
        """State for a checkpoint, besides the engines."""
        return self._adaptive.values

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state from a checkpoint."""
        self._adaptive.restore(state)

    def _update(self, batch: TrainBatch, step: int, update: int) -> Metrics:
        """Take one optimizer step of each model on this rank's rows."""
        metrics: Metrics = {}
        if self.critic is not None and self._rl.critic is not None:
            metrics |= self.critic.update(batch, self._lr(self._rl.critic.optimizer, step, update))
        if not self._critic_warms_up(step):
            objective = self._objective_at(self._objective.terms, step)
            metrics |= self.policy.update(batch, objective, self._lr(self._rl.optimizer, step, update))
            metrics |= _moving_coefficients(objective)
            self._adaptive.react(_selected_entropies(objective.terms, metrics))
        return metrics

    def _flops(self, batch: TrainBatch, num_updates: int, step: int) -> float:
        """Operations of this shard's part of the step; 0 where they are not counted."""
        flops, lengths = self.policy.flops, batch.row_lengths
        if flops is None:
            return 0.0
        scorings, passes = int(num_updates > 1) + int(self.reference is not None), self._rl.passes
        total = scorings * flops.forward(lengths, batch.num_scored)
        if not self._critic_warms_up(step):
            total += passes * flops.training(lengths, batch.num_scored)
        if self.critic is not None:
            critic = flops.without_adapter()
            total += critic.forward(lengths, num_scored=0) + passes * critic.training(lengths, num_scored=0)
        return total

    def _critic_warms_up(self, step: int) -> bool:
        return self._rl.critic is not None and step <= self._rl.critic.warmup_steps

    def _objective_at(self, terms: Sequence[TermConfig], step: int) -> StepObjective:
        return objective_at(terms, step, self._rl.steps, self._rl.max_response_tokens, self._adaptive.values)

    def _lr(self, optimizer: OptimizerConfig, step: int, update: int) -> float:
        """Learning rate of an optimizer step, by its position among all optimizer steps of the stage."""
        num_updates = self._rl.updates_per_step
        place, total = (step - 1) * num_updates + update, self._rl.steps * num_updates
        return optimizer.lr * schedule_multiplier(optimizer.schedule, place, total)


def _zero_variance_share(shard: Shard, batch: TrainBatch, sum_over_ranks: SumOverRanks) -> float:
    """Share of zero-variance groups: all their tokens, on every rank, have advantage 0."""
    learned_P = torch.zeros(len(shard.accuracies))
    group_B = torch.tensor(shard.groups, dtype=torch.long)
    learned_P.index_add_(0, group_B, (batch.advantage_BT * batch.response_mask_BT).any(dim=-1).float())
    return float((sum_over_ranks(learned_P) == 0).double().mean())


def _selected_entropies(terms: Sequence[TermConfig], metrics: Metrics) -> dict[str, float]:
    """Mean entropy of each term's tokens over all ranks; terms without tokens are left out."""
    names = {term.name: f"actor/{term.name}_entropy" for term in terms}
    return {term: metrics[name] for term, name in names.items() if name in metrics}


def _moving_coefficients(objective: StepObjective) -> Metrics:
    return {
        f"actor/{term.name}_coefficient": coefficient
        for term, coefficient in zip(objective.terms, objective.coefficients, strict=True)
        if not isinstance(term.coefficient, ConstantValue)
    }


def _mean_over_updates(history: Sequence[Metrics]) -> Metrics:
    names = dict.fromkeys(name for metrics in history for name in metrics)
    means = {}
    for name in names:
        values = [metrics[name] for metrics in history if name in metrics]
        means[name] = sum(values) / len(values)
    return means

"""The learning half of an RL step: graded groups in, optimizer steps out.

Shape legend: `B` rows, groups end to end; `T` tokens.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.config.objective import (
    AdvantageConfig,
    ConstantValue,
    GeneralizedAdvantage,
    GroupAdvantage,
    ObjectiveConfig,
    TermConfig,
)
from luffy.config.training import RLConfig
from luffy.objectives.advantages import RowRewards, group_advantages
from luffy.objectives.gae import generalized_advantages, whiten
from luffy.objectives.ranks import SumOverRanks
from luffy.objectives.schedules import AdaptiveCoefficients, schedule_multiplier
from luffy.objectives.step import StepObjective, objective_at
from luffy.training.batching import collate, take_rows
from luffy.training.critic import Critic
from luffy.training.distributed import sum_over_ranks
from luffy.training.frozen_policy import FrozenPolicy
from luffy.training.policy import Policy
from luffy.types import Group, TrainBatch, Trajectory

Metrics = dict[str, float]


def row_advantages(groups: Sequence[Group], config: GroupAdvantage, sum_over_ranks: SumOverRanks) -> Tensor:
    """`(B,)` float64 advantages of all rows, before any scale."""
    rows = _rows(groups)
    return group_advantages(
        RowRewards(
            reward_B=torch.tensor([row.reward for row in rows], dtype=torch.float64),
            length_B=torch.tensor([len(row.response_ids) for row in rows]),
            group_B=torch.tensor([index for index, group in enumerate(groups) for _ in group.trajectories]),
            is_off_policy_B=torch.tensor([row.is_off_policy for row in rows]),
        ),
        config,
        sum_over_ranks,
    )


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """What the critic learns from; `(B, T)` both, 0 outside responses."""

    value_old_BT: Tensor
    return_BT: Tensor


def batch_of(
    groups: Sequence[Group], config: AdvantageConfig, pad_id: int, critic: Critic | None = None
) -> tuple[TrainBatch, ValueTargets | None]:
    """The groups as one batch whose tokens carry their advantages; with a critic, its targets, too."""
    rows = _rows(groups)
    accuracy_B = torch.tensor([group.accuracy for group in groups for _ in group.trajectories], dtype=torch.float64)
    if isinstance(config, GeneralizedAdvantage):
        assert critic is not None, "GAE needs a critic"
        batch = collate(rows, torch.zeros(len(rows)), pad_id, accuracy_B)
        batch, targets = _with_gae(batch, rows, config, critic)
    else:
        batch = collate(rows, row_advantages(groups, config, sum_over_ranks), pad_id, accuracy_B)
        targets = None
    return dataclasses.replace(batch, advantage_BT=batch.advantage_BT * _advantage_scale(batch, rows, config)), targets


def _with_gae(
    batch: TrainBatch, rows: Sequence[Trajectory], config: GeneralizedAdvantage, critic: Critic
) -> tuple[TrainBatch, ValueTargets]:
    value_BT = critic.values(batch)
    reward_B = torch.tensor([row.reward for row in rows], dtype=torch.float64)
    advantage_BT, return_BT = generalized_advantages(reward_B, value_BT, batch.response_mask_BT, config)
    if config.whiten:
        advantage_BT = whiten(advantage_BT, batch.response_mask_BT, sum_over_ranks)
    return dataclasses.replace(batch, advantage_BT=advantage_BT.float()), ValueTargets(value_BT, return_BT.float())


def _advantage_scale(batch: TrainBatch, rows: Sequence[Trajectory], config: AdvantageConfig) -> Tensor:
    scale_BT = torch.where(batch.is_off_policy_BT, config.off_policy_scale, config.on_policy_scale)
    if config.zero_truncated:
        scale_BT[[row.is_truncated for row in rows]] = 0.0
    return scale_BT


class Learner:
    """Turns the groups of RL steps into optimizer steps of the policy and, where there is one, its critic."""

    def __init__(
        self,
        policy: Policy,
        objective: ObjectiveConfig,
        rl: RLConfig,
        pad_id: int,
        critic: Critic | None = None,
        reference: FrozenPolicy | None = None,
    ) -> None:
        assert (critic is not None) == objective.needs_critic
        assert (reference is not None) == objective.needs_reference
        self.policy = policy
        self.critic = critic
        self._reference = reference
        self._objective = objective
        self._rl = rl
        self._pad_id = pad_id
        self._adaptive = AdaptiveCoefficients(objective.terms)

    def learn(self, groups: Sequence[Group], step: int) -> Metrics:
        """The optimizer steps of RL step `step` (from 1); returns their metrics, averaged. No group, no update.

        Every rank must be given as many groups as the others, or none of them any: updates are made together.
        """
        if not groups:
            return {}
        batch, targets = batch_of(groups, self._objective.advantage, self._pad_id, self.critic)
        parts = list(_mini_batches(groups, self._rl.updates_per_step))
        if len(parts) > 1:
            # From the second update on the policy has moved; with one update it stands in for itself.
            batch = dataclasses.replace(batch, logp_old_BT=self.policy.logprobs(batch))
        if self._reference is not None:
            batch = dataclasses.replace(batch, logp_ref_BT=self._reference.logprobs(batch))
        history = [self._update(batch, targets, rows, step, update) for update, rows in enumerate(parts)]
        return _mean_over_updates(history) | {"batch/zero_advantage_share": _silent_share(groups, batch)}

    def imitate(self, rows: Sequence[Trajectory], step: int) -> Metrics:
        """One SFT step on demonstrations between the RL steps (`objective.interleaved_sft`)."""
        config = self._objective.interleaved_sft
        assert config is not None
        batch = collate(rows, torch.zeros(len(rows)), self._pad_id)
        last_update = self._rl.updates_per_step - 1
        lr = config.lr_scale * self._lr(step, last_update)
        metrics = self.policy.update(batch, self._objective_at(config.terms, step), lr)
        kept = {name: metrics[f"actor/{name}"] for name in ("loss", "grad_norm", "lr")}
        return {f"actor/interleaved_{name}": value for name, value in kept.items()}

    def state(self) -> Mapping[str, float]:
        """What a checkpoint must hold beside the engines."""
        return self._adaptive.values

    def restore(self, state: Mapping[str, float]) -> None:
        """Take the state of a checkpoint."""
        self._adaptive.restore(state)

    def _update(self, batch: TrainBatch, targets: ValueTargets | None, rows: range, step: int, update: int) -> Metrics:
        part = take_rows(batch, rows)
        metrics: Metrics = {}
        if targets is not None:
            metrics |= self._update_critic(part, targets, rows, step, update)
        if not self._critic_warms_up(step):
            objective = self._objective_at(self._objective.terms, step)
            metrics |= self.policy.update(part, objective, self._lr(step, update))
            metrics |= _moving_coefficients(objective)
            self._adaptive.react(_selected_entropies(objective.terms, metrics))
        return metrics

    def _update_critic(self, part: TrainBatch, targets: ValueTargets, rows: range, step: int, update: int) -> Metrics:
        assert self.critic is not None and self._rl.critic is not None
        width = part.input_ids_BT.shape[1]
        value_old_BT, return_BT = (
            tensor_BT[rows.start : rows.stop, :width] for tensor_BT in (targets.value_old_BT, targets.return_BT)
        )
        multiplier = schedule_multiplier(self._rl.critic.optimizer.schedule, *self._position(step, update))
        return self.critic.update(part, value_old_BT, return_BT, self._rl.critic.optimizer.lr * multiplier)

    def _critic_warms_up(self, step: int) -> bool:
        return self._rl.critic is not None and step <= self._rl.critic.warmup_steps

    def _objective_at(self, terms: Sequence[TermConfig], step: int) -> StepObjective:
        return objective_at(terms, step, self._rl.steps, self._rl.max_response_tokens, self._adaptive.values)

    def _lr(self, step: int, update: int) -> float:
        return self._rl.optimizer.lr * schedule_multiplier(self._rl.optimizer.schedule, *self._position(step, update))

    def _position(self, step: int, update: int) -> tuple[int, int]:
        """Optimizer step from 0, and how many there are."""
        num_updates = self._rl.updates_per_step
        return (step - 1) * num_updates + update, self._rl.steps * num_updates


def _rows(groups: Sequence[Group]) -> list[Trajectory]:
    return [row for group in groups for row in group.trajectories]


def _silent_share(groups: Sequence[Group], batch: TrainBatch) -> float:
    """Share of groups whose tokens all have advantage 0: the policy gradient learns nothing from them."""
    parts = batch.advantage_BT.split([len(group.trajectories) for group in groups])
    return sum(not part.any() for part in parts) / len(parts)


def _mini_batches(groups: Sequence[Group], num_updates: int) -> Iterator[range]:
    """The rows of each update: whole groups, in the order they were sampled, as equally as they can be shared."""
    starts = [0]
    for group in groups:
        starts.append(starts[-1] + len(group.trajectories))
    cuts = [len(groups) * update // num_updates for update in range(num_updates + 1)]
    for first, last in itertools.pairwise(cuts):
        if last > first:  # filters may have left fewer groups than updates
            yield range(starts[first], starts[last])


def _selected_entropies(terms: Sequence[TermConfig], metrics: Metrics) -> dict[str, float]:
    """Mean entropy of each term's tokens, over all ranks; terms without a token are left out."""
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

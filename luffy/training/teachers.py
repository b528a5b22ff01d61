"""The teachers of an RL stage on a rank: they score the rows of a step before its updates.

A row has at most one teacher (`Trajectory.taught_by`). `DistillationTeacher` holds a model; `ServedScores` reads scores
that servers have computed (`luffy.rl.teaching`). Other models than the policy take turns on a GPU where there are
several (`FrozenPolicy.on_device`).

Shape legend: `S` scores of a token, `B` rows, `T` tokens, `C` tokens that divergences compare.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace

import torch

from luffy.config.terms import DivergenceLoss
from luffy.training.batching import collate, take_rows
from luffy.training.policy import FrozenPolicy, Policy, ReferencePolicy
from luffy.training.ranks import max_over_ranks
from luffy.training.update_metrics import ModelFlops
from luffy.types import TrainBatch, Trajectory

_OWN_SCORES = 2
"""Scores of a token before those of the choices: its log-probability and the entropy."""


class ServedScores:
    """The scores that the rows carry, computed by a model on other machines."""

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def teach(self, batch: TrainBatch, rows: Sequence[Trajectory]) -> TrainBatch:
        logp_BT = torch.zeros(batch.input_ids_BT.shape)
        is_scored_BT = batch.response_mask_BT & torch.tensor([[bool(row.teacher_logprobs)] for row in rows])
        # The mask selects the learnable tokens row by row, as the scores are.
        logp_BT[is_scored_BT] = torch.tensor([logp for row in rows for logp in row.teacher_logprobs])
        return replace(batch, logp_teacher_BT=logp_BT)

    def forward_flops(self, rows: Sequence[Trajectory]) -> float:
        """0: other machines do the work."""
        return 0.0


@dataclass(frozen=True, slots=True)
class DistillationTeacher:
    """A model that scores rollouts, each under the prompt that the teacher is shown."""

    model: ReferencePolicy | Policy
    flops: ModelFlops | None
    """None: operations are not counted for this kind of model."""
    pad_id: int
    top_k: int | None = None
    """Number of its own most probable tokens among those that divergences compare; None: there are no divergences."""
    entropy: bool = False
    """Whether terms weigh tokens by its entropy."""

    def on_device(self) -> AbstractContextManager[None]:
        """In this context the model may score."""
        return self.model.on_device() if isinstance(self.model, FrozenPolicy) else nullcontext()

    def teach(self, batch: TrainBatch, rows: Sequence[Trajectory]) -> TrainBatch:
        """The batch with the teacher's log-probabilities of its tokens, their entropies and, for divergences, its
        choices, to which those that the batch already has are candidates."""
        mask_BT, shown = batch.response_mask_BT, batch
        if any(row.teacher_prompt_ids for row in rows):
            shown = collate([_shown(row) for row in rows], torch.zeros(len(rows)), self.pad_id)
            choice_BTC = torch.zeros(*shown.input_ids_BT.shape, batch.choice_BTC.shape[-1], dtype=torch.int32)
            # The prompts differ in length, the responses do not: their tokens follow one another in the same order.
            choice_BTC[shown.response_mask_BT] = batch.choice_BTC[mask_BT]
            shown = replace(shown, choice_BTC=choice_BTC)
        if self.top_k is None and not self.entropy:
            found_SBT = self.model.logprobs(shown).unsqueeze(0)
        else:
            found_SBT = self.model.choices(shown, self.top_k or 0, "value" if self.entropy else "none")
        scores_SBT = torch.zeros(len(found_SBT), *mask_BT.shape)
        scores_SBT[:, mask_BT] = found_SBT[:, shown.response_mask_BT]
        taught = replace(batch, logp_teacher_BT=scores_SBT[0])
        if self.entropy:
            taught = replace(taught, entropy_teacher_BT=scores_SBT[1])
        if self.top_k is None:
            return taught
        scores_BTS = scores_SBT[_OWN_SCORES:].permute(1, 2, 0)
        logq_BTC, choice_BTC = scores_BTS.tensor_split([(scores_BTS.shape[-1] + 1) // 2], -1)
        return replace(taught, choice_BTC=choice_BTC.int(), logq_BTC=logq_BTC)

    def forward_flops(self, rows: Sequence[Trajectory]) -> float:
        """Operations of scoring the rows; 0 where they are not counted."""
        if self.flops is None:
            return 0.0
        return self.flops.forward([_shown(row).num_tokens for row in rows], sum(row.num_learnable for row in rows))


TokenScorer = DistillationTeacher | ServedScores
"""A teacher that terms compare with; the `rows` that it scores are those of the batch, in order."""
_SCORES = ("logp_teacher_BT", "entropy_teacher_BT", "choice_BTC", "logq_BTC")


@dataclass(frozen=True, slots=True)
class Teachers:
    """All teachers of a stage, in the order of `rl.teachers`."""

    scorers: Sequence[TokenScorer]
    policy: Policy
    divergence: DivergenceLoss | None = None
    """A divergence of the objective, which says whose choices are compared; None: there is none."""

    def teach(self, batch: TrainBatch, rows: Sequence[Trajectory]) -> TrainBatch:
        """The batch with what each row's teacher says of it; a collective call. A sole teacher scores all rows at once,
        so that no score depends on which rows are taught."""
        if (num_candidates := self._num_candidates) > 0:
            found_SBT = self.policy.choices(batch, num_candidates)
            chosen_BTC = found_SBT[-((len(found_SBT) - _OWN_SCORES) // 2) :].permute(1, 2, 0)
            batch = replace(batch, choice_BTC=chosen_BTC.int())
        if len(self.scorers) == 1:
            return self.scorers[0].teach(batch, rows)
        taught = batch
        for index, scorer in enumerate(self.scorers):
            own = self._rows_of(index, rows)
            if max_over_ranks(len(own)):
                with scorer.on_device():
                    part = scorer.teach(take_rows(batch, own), [rows[b] for b in own])
                taught = _with_scores(taught, part, own)
        return taught

    def forward_flops(self, rows: Sequence[Trajectory]) -> float:
        """Operations of scoring the rows; 0 where they are not counted."""
        alone, flops = len(self.scorers) == 1, self.policy.flops if self._num_candidates else None
        total = sum(
            scorer.forward_flops(rows if alone else [rows[b] for b in self._rows_of(index, rows)])
            for index, scorer in enumerate(self.scorers)
        )
        if flops is None:
            return total
        return total + flops.forward([row.num_tokens for row in rows], sum(row.num_learnable for row in rows))

    @property
    def _num_candidates(self) -> int:
        """Number of the policy's most probable tokens from which choices are taken."""
        if self.divergence is None or self.divergence.over == "teacher":
            return 0
        return self.divergence.top_k * (2 if self.divergence.over == "both" else 1)

    @staticmethod
    def _rows_of(index: int, rows: Sequence[Trajectory]) -> list[int]:
        return [b for b, row in enumerate(rows) if row.taught_by == index]


def _with_scores(batch: TrainBatch, part: TrainBatch, rows: Sequence[int]) -> TrainBatch:
    """The batch with the scores of a part that has these of its rows, trimmed."""
    index, width, changed = torch.tensor(rows, dtype=torch.long), part.input_ids_BT.shape[1], {}
    for name in (field.name for field in fields(batch) if field.name in _SCORES):
        whole, own = getattr(batch, name), getattr(part, name)
        if whole.shape[2:] != own.shape[2:]:  # the choices of the first teacher, of which the batch has none yet
            whole = whole.new_zeros(*whole.shape[:2], *own.shape[2:])
        changed[name] = whole.clone()
        changed[name][index, :width] = own
    return replace(batch, **changed)


def _shown(row: Trajectory) -> Trajectory:
    return replace(row, prompt_ids=row.teacher_prompt_ids) if row.teacher_prompt_ids else row

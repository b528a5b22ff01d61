"""The teacher of on-policy distillation on a rank: its log-probabilities of the policy's own tokens.

`DistillationTeacher` holds a model; `ServedScores` reads scores that servers have computed
(`luffy/rl/served_teacher.py`).

Shape legend: `B` rows, `T` tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from luffy.training.batching import collate
from luffy.training.flops import ModelFlops
from luffy.training.frozen_policy import ReferencePolicy
from luffy.types import TrainBatch, Trajectory


class TokenScorer(Protocol):
    """The teacher of terms with `kind: distillation`."""

    def logprobs(self, batch: TrainBatch, rows: Sequence[Trajectory]) -> Tensor:
        """`(B, T)` log-probabilities of the response tokens, 0 elsewhere; `rows` are those of the batch, in order."""
        ...

    def forward_flops(self, rows: Sequence[Trajectory]) -> float:
        """Operations of scoring the rows; 0 where they are not counted."""
        ...


class ServedScores:
    """The scores that the rows carry, computed by a model on other machines."""

    def logprobs(self, batch: TrainBatch, rows: Sequence[Trajectory]) -> Tensor:
        """`(B, T)` log-probabilities of the response tokens, 0 elsewhere."""
        logp_BT = torch.zeros(batch.input_ids_BT.shape)
        # The mask selects the learnable tokens row by row, as the scores are.
        logp_BT[batch.response_mask_BT] = torch.tensor([logp for row in rows for logp in row.teacher_logprobs])
        return logp_BT

    def forward_flops(self, rows: Sequence[Trajectory]) -> float:
        """0: other machines do the work."""
        return 0.0


@dataclass(frozen=True, slots=True)
class DistillationTeacher:
    """A frozen model that scores rollouts, each under the prompt that the teacher is shown."""

    model: ReferencePolicy
    flops: ModelFlops | None
    """None: operations are not counted for this kind of model."""
    pad_id: int

    def logprobs(self, batch: TrainBatch, rows: Sequence[Trajectory]) -> Tensor:
        """`(B, T)` log-probabilities of the response tokens, 0 elsewhere; `rows` are those of the batch, in order."""
        if not any(row.teacher_prompt_ids for row in rows):
            return self.model.logprobs(batch)
        shown = self._collated(rows)
        logp_BT = torch.zeros(batch.input_ids_BT.shape)
        # The prompts differ in length, the responses do not: their tokens follow one another in the same order.
        logp_BT[batch.response_mask_BT] = self.model.logprobs(shown)[shown.response_mask_BT]
        return logp_BT

    def forward_flops(self, rows: Sequence[Trajectory]) -> float:
        """Operations of scoring the rows; 0 where they are not counted."""
        if self.flops is None:
            return 0.0
        return self.flops.forward([_shown(row).num_tokens for row in rows], sum(row.num_learnable for row in rows))

    def _collated(self, rows: Sequence[Trajectory]) -> TrainBatch:
        return collate([_shown(row) for row in rows], torch.zeros(len(rows)), self.pad_id)


def _shown(row: Trajectory) -> Trajectory:
    return replace(row, prompt_ids=row.teacher_prompt_ids) if row.teacher_prompt_ids else row

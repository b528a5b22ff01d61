"""Collation of rows into batches, and splitting into micro-batches; pure layout, without effect on gradients.

Shape legend: `K` objective terms, `B` rows, `T` tokens (prompt and response, right-padded).
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from luffy.types import Source, TrainBatch, Trajectory


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward and backward pass."""

    batch: TrainBatch
    """NaN in `logp_old_BT`: the old policy is the current one (a single update in the phase)."""
    weight_KBT: Tensor
    position_ids_BT: Tensor
    packed: bool
    """Whether the sequences are concatenated in one row; positions restart at each."""
    is_dummy: bool = False
    """A dummy micro-batch only keeps a rank in step with the others."""


def collate(
    trajectories: Sequence[Trajectory], advantage_B: Tensor, pad_id: int, group_accuracy_B: Tensor | None = None
) -> TrainBatch:
    """Right-padded batch of prompts and responses; every response token gets its row's advantage.

    `logp_old_BT` is NaN until the policy fills it in, and `logp_ref_BT` is 0 until the reference does. Without
    `group_accuracy_B` (SFT has no rollouts) the group accuracy is 0.
    """
    width = max(len(row.prompt_ids) + len(row.response_ids) for row in trajectories)
    shape = (len(trajectories), width)
    batch = TrainBatch(
        input_ids_BT=torch.full(shape, pad_id, dtype=torch.long),
        attention_mask_BT=torch.zeros(shape, dtype=torch.bool),
        response_mask_BT=torch.zeros(shape, dtype=torch.bool),
        is_off_policy_BT=torch.zeros(shape, dtype=torch.bool),
        advantage_BT=torch.zeros(shape, dtype=torch.float32),
        logp_old_BT=torch.full(shape, torch.nan, dtype=torch.float32),
        logp_behavior_BT=torch.full(shape, torch.nan, dtype=torch.float32),
        logp_ref_BT=torch.zeros(shape, dtype=torch.float32),
        sequence_BT=torch.arange(len(trajectories)).unsqueeze(-1).repeat(1, width),
        is_correct_BT=torch.zeros(shape, dtype=torch.bool),
        group_accuracy_BT=torch.zeros(shape, dtype=torch.float64),
    )
    for b, row in enumerate(trajectories):
        start, end = len(row.prompt_ids), len(row.prompt_ids) + len(row.response_ids)
        batch.input_ids_BT[b, :end] = torch.tensor(row.prompt_ids + row.response_ids)
        batch.attention_mask_BT[b, :end] = True
        batch.response_mask_BT[b, start:end] = True
        batch.is_off_policy_BT[b, start:end] = torch.tensor([s is not Source.ON_POLICY for s in row.source])
        assert len(row.logp_behavior) == len(row.source) == len(row.response_ids)
        batch.logp_behavior_BT[b, start:end] = torch.tensor(row.logp_behavior)
        batch.advantage_BT[b, start:end] = advantage_B[b].float()
        batch.is_correct_BT[b] = row.is_correct
        if group_accuracy_B is not None:
            batch.group_accuracy_BT[b] = group_accuracy_B[b]
    return batch


def take_rows(batch: TrainBatch, rows: Sequence[int]) -> TrainBatch:
    """The given rows, in that order, trimmed to the longest."""
    index = torch.as_tensor(rows, dtype=torch.long)
    width = int(batch.attention_mask_BT[index].sum(dim=-1).max())
    return _map(batch, lambda tensor_BT: tensor_BT[index, :width])


def split_into_micro_batches(batch: TrainBatch, weight_KBT: Tensor, max_tokens: int, packing: bool) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens, longest rows first; a longer row gets its own.

    `weight_KBT` are the token weights of the whole step (`luffy.objectives.normalisation`), split alike.
    """
    length_B = batch.attention_mask_BT.sum(dim=-1).tolist()
    order = sorted(range(len(batch)), key=lambda b: (-length_B[b], b))
    make = _pack if packing else _pad
    return [make(batch, weight_KBT, rows) for rows in _fill(order, length_B, max_tokens, packing)]


def dummy_micro_batch(micro: MicroBatch) -> MicroBatch:
    """A copy with weight 0: ranks with fewer micro-batches than others run it to make the same collective calls."""
    return dataclasses.replace(micro, weight_KBT=torch.zeros_like(micro.weight_KBT), is_dummy=True)


def _fill(order: Sequence[int], length_B: Sequence[int], max_tokens: int, packing: bool) -> list[list[int]]:
    bins: list[list[int]] = []
    used = 0
    for b in order:
        width = length_B[b] if packing else length_B[bins[-1][0]] if bins else 0
        if not bins or used + width > max_tokens:
            bins.append([])
            used, width = 0, length_B[b]
        bins[-1].append(b)
        used += width
    return bins


def _pad(batch: TrainBatch, weight_KBT: Tensor, rows: Sequence[int]) -> MicroBatch:
    part = take_rows(batch, rows)
    rows_, width = part.input_ids_BT.shape
    position_ids_BT = torch.arange(width).expand(rows_, width)
    return MicroBatch(part, weight_KBT[:, list(rows), :width], position_ids_BT, packed=False)


def _pack(batch: TrainBatch, weight_KBT: Tensor, rows: Sequence[int]) -> MicroBatch:
    index = torch.as_tensor(rows, dtype=torch.long)
    keep_BT = batch.attention_mask_BT[index]
    part = _map(batch, lambda tensor_BT: tensor_BT[index][keep_BT].unsqueeze(0))
    weight_K1T = torch.stack([weight_BT[index][keep_BT].unsqueeze(0) for weight_BT in weight_KBT])
    position_ids_BT = torch.arange(keep_BT.shape[1]).expand_as(keep_BT)[keep_BT].unsqueeze(0)
    return MicroBatch(part, weight_K1T, position_ids_BT, packed=True)


def _map(batch: TrainBatch, function: Callable[[Tensor], Tensor]) -> TrainBatch:
    return TrainBatch(**{field.name: function(getattr(batch, field.name)) for field in fields(batch)})

"""Collation of rows into batches, and splitting into micro-batches; pure layout, without effect on gradients.

Shape legend: `K` weights of a token (one a term), `B` rows, `T` tokens (prompt and response, right-padded).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from luffy.types import Source, TrainBatch, Trajectory


def collate(
    trajectories: Sequence[Trajectory],
    advantage_B: Tensor,
    pad_id: int,
    group_accuracy_B: Tensor | None = None,
    episodes: Sequence[int] | None = None,
) -> TrainBatch:
    """Right-padded batch of prompts and responses; every response token gets its row's advantage.

    Tokens of an environment lie between response tokens, as context that the response mask leaves out.

    What the models add is empty: `logp_old_BT` is NaN; `logp_ref_BT`, `logp_teacher_BT`, `value_old_BT` and
    `return_BT` are 0. Without `group_accuracy_B` (SFT has no rollouts) the group accuracy is 0. `episodes` has the
    number of each row's episode (`Shard.episodes`); None: each row is a response by itself.
    """
    row_B = torch.arange(len(trajectories))
    episode_B = row_B if episodes is None else torch.tensor(episodes, dtype=torch.long)
    width = max((row.num_tokens for row in trajectories), default=0)
    shape = (len(trajectories), width)
    batch = TrainBatch(
        input_ids_BT=torch.full(shape, pad_id, dtype=torch.long),
        attention_mask_BT=torch.zeros(shape, dtype=torch.bool),
        position_ids_BT=torch.arange(width).repeat(len(trajectories), 1),
        response_mask_BT=torch.zeros(shape, dtype=torch.bool),
        is_off_policy_BT=torch.zeros(shape, dtype=torch.bool),
        advantage_BT=torch.zeros(shape, dtype=torch.float32),
        logp_old_BT=torch.full(shape, torch.nan, dtype=torch.float32),
        logp_behavior_BT=torch.full(shape, torch.nan, dtype=torch.float32),
        logp_ref_BT=torch.zeros(shape, dtype=torch.float32),
        logp_teacher_BT=torch.zeros(shape, dtype=torch.float32),
        value_old_BT=torch.zeros(shape, dtype=torch.float32),
        return_BT=torch.zeros(shape, dtype=torch.float32),
        sequence_BT=row_B.unsqueeze(-1).repeat(1, width),
        episode_BT=episode_B.unsqueeze(-1).repeat(1, width),
        is_correct_BT=torch.zeros(shape, dtype=torch.bool),
        group_accuracy_BT=torch.zeros(shape, dtype=torch.float64),
    )
    for b, row in enumerate(trajectories):
        start, end = len(row.prompt_ids), row.num_tokens
        batch.input_ids_BT[b, :end] = torch.tensor(row.prompt_ids + row.response_ids)
        batch.attention_mask_BT[b, :end] = True
        source_T = torch.tensor(row.source, dtype=torch.long)
        batch.response_mask_BT[b, start:end] = source_T != Source.ENVIRONMENT
        batch.is_off_policy_BT[b, start:end] = (source_T != Source.ON_POLICY) & (source_T != Source.ENVIRONMENT)
        assert not row.context_starts, "an episode with several contexts is trained on as its branches"
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
    width = max(batch.attention_mask_BT[index].sum(dim=-1).tolist(), default=0)
    return batch.map(lambda tensor_BT: tensor_BT[index, :width])


def split_into_micro_batches(
    batch: TrainBatch, weight_KBT: Tensor, max_tokens: int, packing: bool, multiple: int = 1
) -> list[tuple[TrainBatch, Tensor]]:
    """Micro-batches of at most `max_tokens` tokens with their weights, longest rows first; a longer row gets its own.

    `weight_KBT` are the token weights of the whole step (`luffy.objectives.normalisation`), split alike. With `packing`
    the sequences of a micro-batch follow one another in a single row, without padding. `multiple` divides the width of
    every micro-batch, by padding at its end.
    """
    length_B = batch.attention_mask_BT.sum(dim=-1).tolist()
    order = sorted(range(len(batch)), key=lambda b: (-length_B[b], b))
    cut = _packed if packing else _padded
    cuts = [cut(batch, weight_KBT, rows) for rows in _fill(order, length_B, max_tokens, packing)]
    return [_widened(micro, micro_weight_KBT, multiple) for micro, micro_weight_KBT in cuts]


def dummy_micro_batch(batch: TrainBatch, weight_KBT: Tensor, multiple: int = 1) -> tuple[TrainBatch, Tensor]:
    """A micro-batch of a single token that is no response token, and padding up to `multiple` tokens.

    Ranks with fewer micro-batches than others run it to make the same collective calls.
    """
    dummy = batch.map(lambda tensor_BT: tensor_BT.new_zeros(1, 1))
    attended = torch.ones_like(dummy.attention_mask_BT)  # attention over nothing is NaN
    return _widened(replace(dummy, attention_mask_BT=attended), weight_KBT.new_zeros(len(weight_KBT), 1, 1), multiple)


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


def _padded(batch: TrainBatch, weight_KBT: Tensor, rows: Sequence[int]) -> tuple[TrainBatch, Tensor]:
    part = take_rows(batch, rows)
    return part, weight_KBT[:, list(rows), : part.input_ids_BT.shape[1]]


def _packed(batch: TrainBatch, weight_KBT: Tensor, rows: Sequence[int]) -> tuple[TrainBatch, Tensor]:
    index = torch.as_tensor(rows, dtype=torch.long)
    keep_BT = batch.attention_mask_BT[index]
    part = batch.map(lambda tensor_BT: tensor_BT[index][keep_BT].unsqueeze(0))
    return part, torch.stack([weight_BT[index][keep_BT].unsqueeze(0) for weight_BT in weight_KBT])


def _widened(micro: TrainBatch, weight_KBT: Tensor, multiple: int) -> tuple[TrainBatch, Tensor]:
    """Zeros at the end of each row up to a multiple of tokens; in a packed row, each is a sequence at position 0."""
    missing = -micro.input_ids_BT.shape[1] % multiple
    if not missing:
        return micro, weight_KBT
    return micro.map(lambda tensor_BT: F.pad(tensor_BT, (0, missing))), F.pad(weight_KBT, (0, missing))

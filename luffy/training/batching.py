"""From the groups of a step to micro-batches: optimizer steps, shards of ranks, batches, micro-batches.

`shard_groups` computes advantages, which depend on whole groups, before groups are split, and before an episode with
several contexts becomes several rows, which all have its advantage. A response can go to any rank: whatever depends on
several (denominators, whitening, metrics) is summed over ranks. A response is one row, or a row for each context of its
episode (`Trajectory.branches`). Batches and micro-batches are pure layout, without effect on gradients.

Shape legend: `K` weights of a token (one a term), `B` rows, `T` tokens (prompt and response, right-padded).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from luffy.config.group import AdvantageConfig, GroupAdvantage
from luffy.objectives.advantages import RowRewards, group_advantages
from luffy.seeds import derive_seed
from luffy.types import NO_TEACHER, Group, Source, TrainBatch, Trajectory


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of one rank in a step, in the order of their optimizer steps."""

    rows: tuple[Trajectory, ...]
    groups: tuple[int, ...]
    """For each row, the index of its group in the step."""
    episodes: tuple[int, ...]
    """For each row, the index of its response in the step: the rows of an episode with several contexts share it."""
    advantages: tuple[float, ...]
    """For each row, its advantage before scaling; 0 where a critic gives one to each token."""
    updates: tuple[range, ...]
    """The rows of each optimizer step, possibly none; later passes repeat those of earlier steps. All ranks have the
    same number of steps."""
    accuracies: tuple[float, ...]
    """Share of correct rollouts of every group in the step, also of groups whose rows are on other ranks."""

    def part(self, updates: Sequence[Sequence[int]]) -> "Shard":
        """The shard with only the rows of `updates`, one sequence of row indices for each optimizer step."""
        order = [row for update in updates for row in update]
        ends = itertools.accumulate(map(len, updates))
        return Shard(
            rows=tuple(self.rows[row] for row in order),
            groups=tuple(self.groups[row] for row in order),
            episodes=tuple(self.episodes[row] for row in order),
            advantages=tuple(self.advantages[row] for row in order),
            updates=tuple(range(end - len(update), end) for update, end in zip(updates, ends, strict=True)),
            accuracies=self.accuracies,
        )


def shard_rows(rows: Sequence[Trajectory], num_ranks: int) -> list[Shard]:
    """Rows without groups (demonstrations), in one optimizer step."""
    sequences, episodes = branches_of(rows)
    count = len(sequences)
    whole = Shard(sequences, (0,) * count, episodes, (0.0,) * count, (range(count),), accuracies=(0.0,))
    return over_ranks(whole, whole.updates, num_ranks)


def branches_of(responses: Sequence[Trajectory]) -> tuple[tuple[Trajectory, ...], tuple[int, ...]]:
    """The sequences of all responses, in order, and for each the index of its response."""
    numbered = [(row, index) for index, response in enumerate(responses) for row in response.branches()]
    return tuple(row for row, _ in numbered), tuple(index for _, index in numbered)


def over_ranks(whole: Shard, updates: Sequence[Sequence[int]], num_ranks: int) -> list[Shard]:
    """A shard for each rank, with its part of the rows of every optimizer step, balanced by number of tokens.

    The longest response goes first, to the rank with the fewest tokens: the fullest rank has at most 4/3 of the tokens
    of the best split (Graham 1969). The rows of a response stay together, since its rank counts its tokens. Rows keep
    their order within a rank.
    """
    balanced: list[list[list[int]]] = []
    for update in updates:
        responses: dict[int, list[int]] = {}
        for row in update:
            responses.setdefault(whole.episodes[row], []).append(row)
        length = {index: sum(whole.rows[row].num_tokens for row in rows) for index, rows in responses.items()}
        placed: list[list[int]] = [[] for _ in range(num_ranks)]
        load = [0] * num_ranks
        for index in sorted(responses, key=lambda index: (-length[index], index)):
            rank = load.index(min(load))
            placed[rank] += responses[index]
            load[rank] += length[index]
        balanced.append([sorted(of_rank) for of_rank in placed])
    return [whole.part([of_rank[rank] for of_rank in balanced]) for rank in range(num_ranks)]


def shard_groups(
    groups: Sequence[Group], config: AdvantageConfig, num_updates: int, num_ranks: int, seed: int, passes: int = 1
) -> list[Shard]:
    """The groups of an RL step as one shard for each rank.

    Whole groups are assigned to the `num_updates` optimizer steps of a pass (`deal_groups`, independent of the number
    of ranks), and the rows of an optimizer step are then balanced over the ranks by number of tokens. Later passes
    repeat these optimizer steps in other orders.
    """
    whole = one_shard(groups, config)
    hands = deal_groups(groups, num_updates, seed)
    updates = [[row for row, group in enumerate(whole.groups) if group in hand] for hand in hands]
    order = order_of_passes(len(updates), passes, seed)
    return [
        replace(shard, updates=tuple(shard.updates[update] for update in order))
        for shard in over_ranks(whole, updates, num_ranks)
    ]


def one_shard(groups: Sequence[Group], config: AdvantageConfig) -> Shard:
    """All rows, group after group, in one optimizer step."""
    responses = [row for group in groups for row in group.learned]
    group_of = [index for index, group in enumerate(groups) for _ in group.learned]
    by_group = isinstance(config, GroupAdvantage)
    compared = iter(row_advantages(groups, config).tolist()) if by_group else itertools.repeat(0.0)
    in_group = [place < len(group.trajectories) for group in groups for place in range(len(group.learned))]
    advantages = [next(compared) if each else 0.0 for each in in_group]
    rows, episodes = branches_of(responses)
    return Shard(
        rows=rows,
        groups=tuple(group_of[episode] for episode in episodes),
        episodes=episodes,
        advantages=tuple(advantages[episode] for episode in episodes),
        updates=(range(len(rows)),),
        accuracies=tuple(group.accuracy for group in groups),
    )


def row_advantages(groups: Sequence[Group], config: AdvantageConfig) -> Tensor:
    """`(B,)` float64 advantages of all responses, group after group, before scaling; without those beside a group."""
    rows = [row for group in groups for row in group.trajectories]
    return group_advantages(
        RowRewards(
            reward_B=torch.tensor([row.reward for row in rows], dtype=torch.float64),
            length_B=torch.tensor([row.num_learnable for row in rows]),
            group_B=torch.tensor(
                [index for index, group in enumerate(groups) for _ in group.trajectories], dtype=torch.long
            ),
            is_off_policy_B=torch.tensor([row.is_off_policy for row in rows], dtype=torch.bool),
        ),
        config,
    )


def deal_groups(groups: Sequence[Group], num_updates: int, seed: int) -> list[list[int]]:
    """Indices of the groups for each optimizer step, in the order of the RL step.

    Groups arrive sorted: replayed prompts first, later rounds of dynamic sampling last. Contiguous mini-batches would
    carry that order into the updates, so groups are dealt out in random order, one to each update in turn. The updates
    differ by at most one in their number of groups, and in the numbers of replayed, demonstrated,
    prefix-conditioned and hinted ones. With fewer groups than updates there are fewer updates. A pure function of the
    kinds of the groups and of `seed`.
    """
    order = sorted(range(len(groups)), key=lambda place: (_stratum(groups[place]), derive_seed(seed, "deal", place)))
    first = derive_seed(seed, "first update") % num_updates
    hands: list[list[int]] = [[] for _ in range(num_updates)]
    for turn, place in enumerate(order, start=first):
        hands[turn % num_updates].append(place)
    return [sorted(hand) for hand in hands if hand]


def order_of_passes(num_updates: int, passes: int, seed: int) -> list[int]:
    """The mini-batch of each optimizer step, over all passes: dealt once, taken in a new order by every later pass.

    A row keeps its mini-batch, so that it stays on one rank with its old log-probabilities and every optimizer step
    stays balanced over the ranks; the order changes, so that no mini-batch is always the last one. A pure function.
    """
    later = [
        sorted(range(num_updates), key=lambda update: derive_seed(seed, "pass", number, update))
        for number in range(1, passes)
    ]
    return [*range(num_updates), *(update for order in later for update in order)]


def has_prefix_row(group: Group) -> bool:
    return any(_is_prefix_conditioned(row) for row in group.trajectories)


def has_demonstration(group: Group) -> bool:
    return any(Source.OFF_POLICY in row.source and not _is_prefix_conditioned(row) for row in group.trajectories)


def _is_prefix_conditioned(row: Trajectory) -> bool:
    return Source.OFF_POLICY in row.source and Source.ON_POLICY in row.source


def has_hinted_row(group: Group) -> bool:
    return any(row.is_hinted for row in group.learned)


def _stratum(group: Group) -> tuple[bool, bool, bool, bool]:
    """Sort key that keeps each kind of group contiguous, so that dealing in turn spreads it evenly.

    The order is: replayed, replayed and demonstrated, demonstrated, prefix-conditioned, hinted, others.
    """
    replayed, demonstrated = group.is_replayed, has_demonstration(group)
    hinted = has_hinted_row(group)
    return (not replayed, demonstrated if replayed else not demonstrated, not has_prefix_row(group), not hinted)


def collate(
    trajectories: Sequence[Trajectory],
    advantage_B: Tensor,
    pad_id: int,
    group_accuracy_B: Tensor | None = None,
    episodes: Sequence[int] | None = None,
) -> TrainBatch:
    """Right-padded batch of prompts and responses; every response token gets its row's advantage.

    Tokens of an environment lie between response tokens, as context that the response mask leaves out.

    What the models add is empty: `logp_old_BT` is NaN; `logp_ref_BT`, `logp_teacher_BT`, `entropy_teacher_BT`,
    `value_old_BT` and `return_BT` are 0, and a teacher has no choices. Without `group_accuracy_B` (SFT has no rollouts)
    the group accuracy is 0. `episodes` has the number of each row's episode (`Shard.episodes`); None: each row is a
    response by itself.
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
        entropy_teacher_BT=torch.zeros(shape, dtype=torch.float32),
        choice_BTC=torch.zeros((*shape, 0), dtype=torch.int32),
        logq_BTC=torch.zeros((*shape, 0), dtype=torch.float32),
        taught_by_BT=torch.full(shape, NO_TEACHER, dtype=torch.int8),
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
        batch.taught_by_BT[b] = row.taught_by
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

    `weight_KBT` are the token weights of the whole step (`luffy.objectives.objective`), split alike. With `packing`
    the sequences of a micro-batch follow one another in a single row, without padding. `multiple` divides the width of
    every micro-batch, by padding at its end.
    """
    length_B = batch.attention_mask_BT.sum(dim=-1).tolist()
    order = sorted(range(len(batch)), key=lambda b: (-length_B[b], b))
    bins: list[list[int]] = []
    used = 0
    for b in order:
        width = length_B[b] if packing else length_B[bins[-1][0]] if bins else 0
        if not bins or used + width > max_tokens:
            bins.append([])
            used, width = 0, length_B[b]
        bins[-1].append(b)
        used += width
    if packing:
        micros = [_packed(batch, weight_KBT, rows) for rows in bins]
    else:
        parts = [(take_rows(batch, rows), rows) for rows in bins]
        micros = [(part, weight_KBT[:, rows, : part.input_ids_BT.shape[1]]) for part, rows in parts]
    return [_widened(_numbered(micro), weight_KBT, multiple) for micro, weight_KBT in micros]


def dummy_micro_batch(batch: TrainBatch, weight_KBT: Tensor, multiple: int = 1) -> tuple[TrainBatch, Tensor]:
    """A micro-batch of a single token that is no response token, and padding up to `multiple` tokens.

    Ranks with fewer micro-batches than others run it to make the same collective calls.
    """
    dummy = batch.map(lambda tensor_BT: tensor_BT.new_zeros(1, 1, *tensor_BT.shape[2:]))
    attended = torch.ones_like(dummy.attention_mask_BT)  # attention over nothing is NaN
    return _widened(replace(dummy, attention_mask_BT=attended), weight_KBT.new_zeros(len(weight_KBT), 1, 1), multiple)


def _packed(batch: TrainBatch, weight_KBT: Tensor, rows: Sequence[int]) -> tuple[TrainBatch, Tensor]:
    index = torch.as_tensor(rows, dtype=torch.long)
    keep_BT = batch.attention_mask_BT[index]
    part = batch.map(lambda tensor_BT: tensor_BT[index][keep_BT].unsqueeze(0))
    return part, torch.stack([weight_BT[index][keep_BT].unsqueeze(0) for weight_BT in weight_KBT])


def _numbered(micro: TrainBatch) -> TrainBatch:
    """The micro-batch with its sequences numbered from 0, as the losses need them."""
    return replace(micro, sequence_BT=micro.sequence_BT.unique(return_inverse=True)[1])


def _widened(micro: TrainBatch, weight_KBT: Tensor, multiple: int) -> tuple[TrainBatch, Tensor]:
    """Zeros at the end of each row up to a multiple of tokens; in a packed row, each is a sequence at position 0."""
    missing = -micro.input_ids_BT.shape[1] % multiple
    if not missing:
        return micro, weight_KBT
    widened = micro.map(lambda tensor_BT: F.pad(tensor_BT, (0, 0) * (tensor_BT.dim() - 2) + (0, missing)))
    return widened, F.pad(weight_KBT, (0, missing))


def stream_indices(num_items: int, first: int, count: int, seed: int) -> list[int]:
    """`count` items from position `first` (from 0) of a stream of epochs, each shuffled anew.

    Each epoch holds every item once; the positions may span epochs.
    """
    indices: list[int] = []
    epoch, offset = divmod(first, num_items)
    while len(indices) < count:
        generator = torch.Generator().manual_seed(derive_seed(seed, "epoch", epoch))
        order = torch.randperm(num_items, generator=generator).tolist()
        indices += order[offset : offset + count - len(indices)]
        epoch, offset = epoch + 1, 0
    return indices

"""Assignment of the groups of an RL step to its optimizer steps."""

from collections.abc import Sequence

from luffy.seeds import derive_seed
from luffy.types import Group, Source, Trajectory


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
    """Whether the group has a prefix-conditioned row."""
    return any(_is_prefix_conditioned(row) for row in group.trajectories)


def has_demonstration(group: Group) -> bool:
    """Whether the group has a whole trace as a row."""
    return any(Source.OFF_POLICY in row.source and not _is_prefix_conditioned(row) for row in group.trajectories)


def _is_prefix_conditioned(row: Trajectory) -> bool:
    return Source.OFF_POLICY in row.source and Source.ON_POLICY in row.source


def has_hinted_row(group: Group) -> bool:
    """Whether the group has a row that was sampled under a hinted prompt."""
    return any(row.hint is not None for row in group.trajectories)


def _stratum(group: Group) -> tuple[bool, bool, bool, bool]:
    """Sort key that keeps each kind of group contiguous, so that dealing in turn spreads it evenly.

    The order is: replayed, replayed and demonstrated, demonstrated, prefix-conditioned, hinted, others. A group that is
    prefix-conditioned or hinted is nothing else (`ObjectiveConfig`).
    """
    replayed, demonstrated = group.is_replayed, has_demonstration(group)
    hinted = has_hinted_row(group)
    return (not replayed, demonstrated if replayed else not demonstrated, not has_prefix_row(group), not hinted)

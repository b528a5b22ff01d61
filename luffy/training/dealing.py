"""Which groups of an RL step share an optimizer step."""

from collections.abc import Sequence

from luffy.seeds import derive_seed
from luffy.types import Group, Source, Trajectory


def deal_groups(groups: Sequence[Group], num_updates: int, seed: int) -> list[list[int]]:
    """The places of the groups that each optimizer step takes, in the order of the RL step.

    Groups arrive sorted: replayed prompts first, later rounds of dynamic sampling last. Contiguous mini-batches would
    carry that order into the updates, so groups are dealt out at random instead, one update after the other. Updates
    differ by at most one in their number of groups, and in how many of them are replayed, demonstrated and hinted.
    Fewer groups than updates make fewer updates. A pure function of the kinds of the groups and of `seed`.
    """
    order = sorted(range(len(groups)), key=lambda place: (_stratum(groups[place]), derive_seed(seed, "deal", place)))
    first = derive_seed(seed, "first update") % num_updates
    hands: list[list[int]] = [[] for _ in range(num_updates)]
    for turn, place in enumerate(order, start=first):
        hands[turn % num_updates].append(place)
    return [sorted(hand) for hand in hands if hand]


def is_hinted(group: Group) -> bool:
    """Whether a row continues the start of a trace."""
    return any(_is_hybrid(row) for row in group.trajectories)


def is_demonstrated(group: Group) -> bool:
    """Whether a row is a whole trace."""
    return any(Source.OFF_POLICY in row.source and not _is_hybrid(row) for row in group.trajectories)


def _is_hybrid(row: Trajectory) -> bool:
    return Source.OFF_POLICY in row.source and Source.ON_POLICY in row.source


def _stratum(group: Group) -> tuple[bool, bool, bool]:
    """Sorts groups so that each kind is one stretch, which a deal in turn then spreads evenly.

    Replayed; replayed and demonstrated; demonstrated; hinted; neither. A group with a hint has nothing else
    (`ObjectiveConfig`).
    """
    replayed, demonstrated = group.is_replayed, is_demonstrated(group)
    return (not replayed, demonstrated if replayed else not demonstrated, not is_hinted(group))

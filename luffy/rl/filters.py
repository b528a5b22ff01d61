"""Which groups an RL step learns from.

A group is silent when the rewards of all its rows are equal: rollouts, guided and replayed rows together. That is the
joint population, where such a group has no policy gradient. Under `advantage.population: on_policy` the same rule
keeps a group whose rollouts are all wrong beside a right trace: its trace still teaches through the supervised term.
"""

from collections.abc import Sequence

from luffy.config.objective import GroupFilter, RefillGroups
from luffy.types import Group


def is_silent(group: Group) -> bool:
    """Whether all rewards of the group are equal."""
    return len(set(group.rewards)) <= 1


def kept_groups(groups: Sequence[Group], group_filter: GroupFilter | None, wanted: int) -> list[Group]:
    """The groups to learn from, in their order.

    None keeps all, `drop_silent` those that are not silent, `refill` the first `wanted` of those (DAPO, arXiv
    2503.14476, section 3.2). The list may be empty.
    """
    if group_filter is None:
        return list(groups)
    speaking = [group for group in groups if not is_silent(group)]
    return speaking[:wanted] if isinstance(group_filter, RefillGroups) else speaking


def needs_more(groups: Sequence[Group], group_filter: GroupFilter | None, wanted: int, rounds_done: int) -> bool:
    """Whether to roll out another round: `groups` are those of all `rounds_done` rounds, of which fewer than `wanted`
    are kept."""
    if not isinstance(group_filter, RefillGroups) or rounds_done >= group_filter.max_rounds:
        return False
    return len(kept_groups(groups, group_filter, wanted)) < wanted

"""Which groups an RL step learns from.

A zero-variance group is one whose rewards are all equal, over rollouts, guided and replayed rows together: the joint
population, in which such a group has no policy gradient. Under `advantage.population: on_policy` the same rule keeps a
group of wrong rollouts beside a right trace, which still teaches through the supervised term.
"""

from collections.abc import Sequence

from luffy.config.objective import DynamicSampling, GroupFilter
from luffy.types import Group


def has_zero_variance(group: Group) -> bool:
    """Whether all rewards of the group are equal."""
    return len(set(group.rewards)) <= 1


def kept_groups(groups: Sequence[Group], group_filter: GroupFilter | None, wanted: int) -> list[Group]:
    """The groups to learn from, in their order; perhaps none.

    Without a filter all of them; `drop_zero_variance` drops the zero-variance groups; `dynamic_sampling` keeps the
    first `wanted` of the rest (DAPO, arXiv 2503.14476, section 3.2).
    """
    if group_filter is None:
        return list(groups)
    varied = [group for group in groups if not has_zero_variance(group)]
    return varied[:wanted] if isinstance(group_filter, DynamicSampling) else varied


def needs_more(groups: Sequence[Group], group_filter: GroupFilter | None, wanted: int, rounds_done: int) -> bool:
    """Whether to roll out another round, given the `groups` of the `rounds_done` rounds before it."""
    if not isinstance(group_filter, DynamicSampling) or rounds_done >= group_filter.max_rounds:
        return False
    return len(kept_groups(groups, group_filter, wanted)) < wanted

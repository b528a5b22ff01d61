"""Filters that choose the groups an RL step trains on.

A zero-variance group is one whose rewards are all equal, over rollouts, off-policy and replayed rows together: with the
joint population, it has no policy gradient. The same rule applies under `advantage.population: on_policy`, and keeps a
group of wrong rollouts with a correct trace, which contributes through the supervised term.
"""

from collections.abc import Sequence

from luffy.config.objective import DynamicSampling, GroupFilter
from luffy.types import Group


def has_zero_variance(group: Group) -> bool:
    """Whether all rewards of the group are equal."""
    return len(set(group.rewards)) <= 1


def kept_groups(groups: Sequence[Group], group_filter: GroupFilter | None, wanted: int) -> list[Group]:
    """The groups to train on, in order; possibly none.

    Groups that are not learnable (`Group.is_learnable`) are left out. No filter keeps all others, `drop_zero_variance`
    drops the zero-variance ones, and `dynamic_sampling` then keeps the first `wanted` of the rest (DAPO, arXiv
    2503.14476, section 3.2).
    """
    learnable = [group for group in groups if group.is_learnable]
    if group_filter is None:
        return learnable
    varied = [group for group in learnable if not has_zero_variance(group)]
    return varied[:wanted] if isinstance(group_filter, DynamicSampling) else varied


def needs_more(groups: Sequence[Group], group_filter: GroupFilter | None, wanted: int, rounds_done: int) -> bool:
    """Whether another round of rollouts is needed, given the groups of the first `rounds_done` rounds."""
    if not isinstance(group_filter, DynamicSampling) or rounds_done >= group_filter.max_rounds:
        return False
    return len(kept_groups(groups, group_filter, wanted)) < wanted

"""Which groups share an optimizer step."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.training.batching import deal_groups, has_demonstration, has_prefix_row, order_of_passes
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory

OWN = Trajectory((1,), (2, 3), (Source.ON_POLICY,) * 2, (-1.0,) * 2, (0,) * 2, 1.0, Outcome.CORRECT, FinishReason.STOP)
TRACE = replace(OWN, source=(Source.OFF_POLICY,) * 2)
HINT = replace(OWN, source=(Source.OFF_POLICY, Source.ON_POLICY))
EARLIER = replace(OWN, source=(Source.REPLAY,) * 2)
ROWS = {
    "plain": (OWN,), "replayed": (OWN, EARLIER), "demonstrated": (OWN, TRACE), "hinted": (OWN, HINT),
    "replayed and demonstrated": (OWN, TRACE, EARLIER),
}  # fmt: skip
# No objective combines replay with prefixes, nor prefixes with whole traces.
WITH_TRACES = st.sampled_from(["plain", "replayed", "demonstrated", "replayed and demonstrated"])
WITH_HINTS = st.sampled_from(["plain", "hinted"])


def _groups(kinds: list[str]) -> list[Group]:
    return [Group(kind, ROWS[kind]) for kind in kinds]


@given(
    kinds=st.one_of(st.lists(WITH_TRACES, max_size=20), st.lists(WITH_HINTS, max_size=20)),
    num_updates=st.integers(1, 6),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_kind_is_spread_evenly_whatever_the_groups(kinds: list[str], num_updates: int, seed: int) -> None:
    groups = _groups(kinds)
    dealt = deal_groups(groups, num_updates, seed)
    assert sorted(place for places in dealt for place in places) == list(range(len(groups)))
    assert len(dealt) == min(num_updates, len(groups))
    assert all(places == sorted(places) for places in dealt)
    for is_kind in (lambda group: True, lambda group: group.is_replayed, has_prefix_row, has_demonstration):
        counts = [sum(is_kind(groups[place]) for place in places) for places in dealt]
        assert max(counts, default=0) - min(counts, default=0) <= 1


@given(kinds=st.lists(WITH_TRACES, max_size=20), seed=st.integers(0, 2**63 - 1))
def test_one_update_takes_the_groups_as_they_come(kinds: list[str], seed: int) -> None:
    assert deal_groups(_groups(kinds), 1, seed) == ([list(range(len(kinds)))] if kinds else [])


def test_groups_of_one_kind_are_dealt_at_random_and_no_update_is_favoured() -> None:
    """Nine groups into two updates: each pair of neighbours is parted as often as chance parts it, 5/9 of the time."""
    groups = _groups(["plain"] * 9)
    parted, larger = Counter(), Counter()
    for seed in range(4000):
        first, second = deal_groups(groups, 2, seed)
        larger[len(first) > len(second)] += 1
        parted.update(place for place in range(8) if (place in first) != (place + 1 in first))
    error = (5 / 9 * 4 / 9 / 4000) ** 0.5
    assert all(parted[place] / 4000 == pytest.approx(5 / 9, abs=4 * error) for place in range(8))
    assert larger[True] / 4000 == pytest.approx(0.5, abs=4 * (0.25 / 4000) ** 0.5)


@given(num_updates=st.integers(1, 6), passes=st.integers(1, 5), seed=st.integers(0, 2**63 - 1))
def test_every_pass_takes_every_mini_batch_once_and_the_first_as_they_were_dealt(
    num_updates: int, passes: int, seed: int
) -> None:
    order = order_of_passes(num_updates, passes, seed)
    each = [order[start : start + num_updates] for start in range(0, len(order), num_updates)]
    assert each[0] == list(range(num_updates))
    assert [sorted(one) for one in each] == [list(range(num_updates))] * passes


def test_later_passes_have_orders_of_their_own() -> None:
    last = Counter(order_of_passes(3, 2, seed)[-1] for seed in range(3000))
    assert all(last[update] == pytest.approx(1000, abs=110) for update in range(3))

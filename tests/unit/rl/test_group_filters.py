"""Which groups a step learns from, and when a round more is rolled out."""

from hypothesis import given
from hypothesis import strategies as st

from luffy.config.objective import DropZeroVariance, DynamicSampling
from luffy.rl.groups import kept_groups, needs_more
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory

DROP = DropZeroVariance(kind="drop_zero_variance")
REFILL = DynamicSampling(kind="dynamic_sampling", max_rounds=3)


def _group(uid: str, *rewards: float, trace: float | None = None) -> Group:
    rows = [(reward, Source.ON_POLICY) for reward in rewards] + ([] if trace is None else [(trace, Source.OFF_POLICY)])
    return Group(
        uid,
        tuple(
            Trajectory((1,), (2,), (source,), (0.0,), (0,), reward, Outcome.WRONG, FinishReason.STOP)
            for reward, source in rows
        ),
    )


SILENT, SPEAKING = _group("silent", 0.0, 0.0), _group("speaking", 0.0, 1.0)
GUIDED = _group("guided", 0.0, 0.0, trace=1.0)


def test_silent_groups_leave_only_where_that_is_asked_for() -> None:
    groups = [SILENT, SPEAKING, _group("solved", 1.0, 1.0)]
    assert kept_groups(groups, None, wanted=1) == groups
    assert kept_groups(groups, DROP, wanted=1) == [SPEAKING]
    assert kept_groups([SILENT], DROP, wanted=1) == []


def test_a_right_trace_beside_wrong_rollouts_is_a_signal() -> None:
    assert kept_groups([GUIDED, _group("no use", 1.0, trace=1.0)], DROP, wanted=2) == [GUIDED]


def test_refill_keeps_the_first_wanted_and_asks_for_more_until_it_has_them_or_its_rounds_are_over() -> None:
    assert kept_groups([SPEAKING, SILENT, GUIDED, SPEAKING], REFILL, wanted=2) == [SPEAKING, GUIDED]
    assert needs_more([SPEAKING, SILENT], REFILL, wanted=2, rounds_done=1)
    assert not needs_more([SPEAKING, SILENT, GUIDED], REFILL, wanted=2, rounds_done=2)
    assert not needs_more([SILENT, SILENT], REFILL, wanted=2, rounds_done=3)


def test_nothing_else_rolls_out_more() -> None:
    assert not needs_more([SILENT], DROP, wanted=2, rounds_done=1)
    assert not needs_more([SILENT], None, wanted=2, rounds_done=1)


@given(st.lists(st.sampled_from([SILENT, SPEAKING, GUIDED]), max_size=8), st.integers(1, 4))
def test_refill_stops_exactly_when_it_has_what_it_wanted(groups: list[Group], wanted: int) -> None:
    complete = len(kept_groups(groups, REFILL, wanted)) == wanted
    assert needs_more(groups, REFILL, wanted, rounds_done=1) is not complete

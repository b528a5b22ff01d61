"""The journal gives back exactly what was committed."""

import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
from reference.gradient_case import CONTEXTS, trajectories
from synthetic.trajectories import row_of

from luffy.tracking.journal import RolloutJournal
from luffy.types import FinishReason, Group, Hint, Source, Trajectory


def _same(left: Trajectory, right: Trajectory) -> bool:
    """Equal, with NaN equal to NaN."""
    return repr(left) == repr(right)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    rows, _ = trajectories("luffy", num_groups=2)
    groups = [Group("a", tuple(rows[:4])), Group("b", tuple(rows[4:]))]
    RolloutJournal(tmp_path).commit(3, groups)
    found = RolloutJournal(tmp_path).read(3)
    assert [group.uid for group in found] == ["a", "b"]
    for before, after in zip(groups, found, strict=True):
        assert all(map(_same, before.trajectories, after.trajectories))
    assert math.isnan(found[0].trajectories[0].logp_behavior[0])


def test_one_group_is_read_alone_and_replaced_rows_stay_apart(tmp_path: Path) -> None:
    rows, _ = trajectories("luffy", num_groups=2)
    groups = [Group("a", tuple(rows[:2]), replaced=tuple(rows[2:3])), Group("b", tuple(rows[3:]))]
    journal = RolloutJournal(tmp_path)
    journal.commit(4, groups)
    assert repr(journal.read(4)) == repr(groups)
    assert [repr(journal.read_group(4, index)) for index in (0, 1)] == [repr(group) for group in groups]
    assert journal.read_group(5, 0) is None


def test_rows_whose_environment_failed_stay_apart(tmp_path: Path) -> None:
    rows, _ = trajectories("luffy", num_groups=1)
    failed = [replace(row, finish_reason=FinishReason.ENVIRONMENT_ERROR) for row in rows[2:4]]
    groups = [
        Group("a", tuple(rows[:1]), replaced=tuple(rows[1:2]), failed=tuple(failed)),
        Group("b", (), failed=tuple(failed[:1])),
    ]
    journal = RolloutJournal(tmp_path)
    journal.commit(1, groups)
    assert repr(journal.read(1)) == repr(groups)
    assert repr(journal.read_group(1, 1)) == repr(groups[1])


def test_hints_come_back_with_their_rows_and_a_journal_without_hints_is_read(tmp_path: Path) -> None:
    rows, _ = trajectories("guide", num_groups=1)
    hinted = [replace(row, hint=Hint(level, "first\nsecond")) for level, row in enumerate(rows[:2], start=1)]
    journal = RolloutJournal(tmp_path)
    journal.commit(1, [Group("a", (rows[3], hinted[0]), replaced=(rows[2], hinted[1]))])
    (group,) = journal.read(1) or []
    assert [row.hint for row in group.hinted] == [row.hint for row in hinted]
    assert _same(group.trajectories[1], hinted[0]) and Source.HINTED in hinted[0].source
    (path,) = tmp_path.glob("*.parquet")
    pq.write_table(pq.read_table(path).drop_columns(["hint", "hint_level"]), path)
    (older,) = journal.read(1) or []
    assert not older.hinted


def test_the_contexts_of_an_episode_come_back_and_a_journal_without_them_is_read(tmp_path: Path) -> None:
    rows, _ = trajectories(f"luffy{CONTEXTS}", num_groups=1)
    assert any(row.context_starts for row in rows)
    journal = RolloutJournal(tmp_path)
    journal.commit(1, [Group("a", tuple(rows))])
    (group,) = journal.read(1) or []
    assert all(map(_same, group.trajectories, rows))
    (path,) = tmp_path.glob("*.parquet")
    pq.write_table(pq.read_table(path).drop_columns(["context_starts"]), path)
    (older,) = journal.read(1) or []
    assert not any(row.context_starts for row in older.trajectories)


def test_a_step_that_was_not_committed_is_absent(tmp_path: Path) -> None:
    journal = RolloutJournal(tmp_path)
    (tmp_path / ".step_000001.parquet.torn").write_bytes(b"torn")
    assert journal.read(1) is None


def test_hybrid_and_replayed_rows_come_back_token_for_token_and_groups_in_order(tmp_path: Path) -> None:
    source = (Source.OFF_POLICY, Source.OFF_POLICY, Source.ON_POLICY)
    hybrid = row_of(1.0, (3, 4, 5), source, logp_behavior=(math.nan, -0.1, -1 / 3), weight_version=(-1, -1, 7))
    old = row_of(1.0, (9, 4), Source.REPLAY, logp_behavior=(-1e-300, -2 / 3), finish_reason=FinishReason.LENGTH)
    groups = [Group("b", (old, hybrid)), Group("a", (hybrid,)), Group("b", (old,))]
    RolloutJournal(tmp_path).commit(1, groups)
    assert repr(RolloutJournal(tmp_path).read(1)) == repr(groups)


def test_a_step_without_groups_is_committed_and_not_absent(tmp_path: Path) -> None:
    RolloutJournal(tmp_path).commit(1, [])
    assert RolloutJournal(tmp_path).read(1) == []

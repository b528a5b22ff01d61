"""The journal gives back exactly what was committed."""

import math
from pathlib import Path

from reference.gradient_case import trajectories

from luffy.tracking.journal import RolloutJournal
from luffy.types import Group, Trajectory


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


def test_a_step_that_was_not_committed_is_absent(tmp_path: Path) -> None:
    journal = RolloutJournal(tmp_path)
    (tmp_path / ".step_000001.parquet.torn").write_bytes(b"torn")
    assert journal.read(1) is None

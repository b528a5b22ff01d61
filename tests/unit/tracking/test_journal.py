"""The journal gives back exactly what was committed."""

import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from reference.gradient_case import CONTEXTS, trajectories
from synthetic.trajectories import hinted_rows, row_of

from luffy.tracking.journal import RolloutJournal
from luffy.types import FinishReason, Group, Source, Start

ROWS = tuple(trajectories("luffy", num_groups=2)[0])
FAILED = tuple(replace(row, finish_reason=FinishReason.ENVIRONMENT_ERROR) for row in ROWS[2:4])
GUIDED = trajectories("guide", num_groups=1)[0]
HINTED = [replace(GUIDED[place], start=Start("hint", dose, "first\nsecond")) for place, dose in enumerate((0.25, None))]
SOURCE = (Source.OFF_POLICY, Source.OFF_POLICY, Source.ON_POLICY)
HYBRID = row_of(1.0, (3, 4, 5), SOURCE, logp_behavior=(math.nan, -0.1, -1 / 3), weight_version=(-1, -1, 7))
OLD = row_of(1.0, (9, 4), Source.REPLAY, logp_behavior=(-1e-300, -2 / 3), finish_reason=FinishReason.LENGTH)
GROUPS = {
    "rollouts and traces": [Group("a", ROWS[:4]), Group("b", ROWS[4:])],
    "replaced": [Group("a", ROWS[:2], replaced=ROWS[2:3]), Group("b", ROWS[3:])],
    "failed": [Group("a", ROWS[:1], replaced=ROWS[1:2], failed=FAILED), Group("b", (), failed=FAILED[:1])],
    "beside": [Group("a", ROWS[:2], failed=FAILED[:1], beside=(HINTED[0], HINTED[1])), Group("b", ROWS[:1])],
    "hints": [Group("a", (GUIDED[3], HINTED[0]), replaced=(GUIDED[2], HINTED[1]))],
    "contexts": [Group("a", tuple(trajectories(f"luffy{CONTEXTS}", num_groups=1)[0]))],
    "hybrid and replayed, a uid twice": [Group("b", (OLD, HYBRID)), Group("a", (HYBRID,)), Group("b", (OLD,))],
    "none": [],
}
PARTIAL = replace(HYBRID, reward=math.nan, finish_reason=FinishReason.INTERRUPTED)
OPEN = [Group("c", (OLD, PARTIAL)), Group("d", (PARTIAL,), is_carried=True)]


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_come_back_exactly_all_at_once_and_one_by_one(tmp_path: Path, kind: str) -> None:
    groups, journal = GROUPS[kind], RolloutJournal(tmp_path)
    RolloutJournal(tmp_path).commit(3, groups)
    assert repr(journal.read(3)) == repr(groups)  # NaN is NaN here
    assert [repr(journal.read_group(3, index)) for index in range(len(groups))] == list(map(repr, groups))


@pytest.mark.parametrize(("kind", "columns"), [("hints", ["start", "dose", "hint"]), ("contexts", ["context_starts"])])
def test_a_journal_from_before_a_column_is_read_without_it(tmp_path: Path, kind: str, columns: list[str]) -> None:
    journal = RolloutJournal(tmp_path)
    journal.commit(1, GROUPS[kind])
    (path,) = tmp_path.glob("*.parquet")
    pq.write_table(pq.read_table(path).drop_columns(columns), path)
    (before,), (after,) = GROUPS[kind], journal.read(1) or []
    shows = [
        bool(hinted_rows(group)) or any(row.context_starts for row in group.trajectories) for group in (before, after)
    ]
    assert shows == [True, False]


def test_open_groups_lie_apart_and_what_was_not_committed_is_absent(tmp_path: Path) -> None:
    journal, carried = RolloutJournal(tmp_path), Group("b", ROWS[4:], is_carried=True)
    (tmp_path / ".step_000001.parquet.torn").write_bytes(b"torn")
    assert journal.read(1) is None and journal.read_group(1, 0) is None
    journal.commit(1, [OPEN[0], *GROUPS["hints"], OPEN[1], carried])
    assert repr(journal.read(1)) == repr([*GROUPS["hints"], carried])
    assert repr(journal.read_open(1)) == repr(OPEN)
    assert repr(journal.read_group(1, 1)) == repr(carried)
    (tmp_path / "step_000001.parquet").unlink()  # killed between the two files
    assert journal.read_open(1) is None
    journal.commit(1, [carried])
    assert (repr(journal.read(1)), journal.read_open(1)) == (repr([carried]), [])

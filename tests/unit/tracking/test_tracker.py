"""Metrics, samples and the rollout journal: a resumed run's files equal an undisturbed one's, and the journal gives
back exactly what was committed."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from reference.gradient_case import CONTEXTS, trajectories
from synthetic.trajectories import hinted_rows, row_of

from luffy.config.execution import TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import read_metrics, without_times
from luffy.tracking.tracker import SampleRollout, Tracker, read_samples
from luffy.types import FinishReason, Group, Source, Start


def opened(out: Path, resumed_from: int = 0) -> Tracker:
    return Tracker(out, "abc123", {"stage": "rl"}, TrackingConfig(), GradingConfig(), resumed_from)


def rollout(step: int) -> SampleRollout:
    return SampleRollout("u", "1 +1", f"ansẅer {step}\u2028\n", "on_policy", 1.0, "correct", 0.5)


def train(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.log(step, {"actor/loss": 1 / step, "reward/mean": step / 7})
        if step % 2 == 0:
            tracker.samples(step, [rollout(step)])


def test_a_resumed_run_leaves_the_same_files_as_an_undisturbed_one_and_one_that_starts_anew_none(tmp_path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    with opened(whole) as tracker:
        train(tracker, range(1, 11))
    train(opened(broken), range(1, 8))  # killed after step 7, checkpoint at 4
    with (broken / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "actor/lo\n{"step": 9')  # half of it once the disk was full, and then the kill
    assert [row["step"] for row in read_metrics(broken / "metrics.jsonl")] == [*range(1, 8)]
    with opened(broken, resumed_from=4) as tracker:
        train(tracker, range(5, 11))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes()
    opened(whole).close()
    assert read_metrics(whole / "metrics.jsonl") == [] == list(read_samples(whole / "samples.jsonl"))


def test_what_is_logged_is_in_the_files_at_once_as_strict_json_and_comes_back(tmp_path) -> None:
    """The first line says how long the start took, and only such times are left out of a comparison."""
    tracker = opened(tmp_path)
    tracker.started()
    tracker.log(1, {"actor/loss": 0.5})
    tracker.log(2, {"actor/loss": math.nan, "actor/lr": math.inf})
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first["perf/start_s"] > 0
    assert (without_times(first), second) == (
        {"step": 1, "actor/loss": 0.5}, {"step": 2, "actor/loss": None, "actor/lr": None},
    )  # fmt: skip
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[1]["actor/loss"])
    tracker.samples(3, [rollout(1), rollout(2)])
    tracker.close()
    assert list(read_samples(tmp_path / "samples.jsonl")) == [(3, rollout(1)), (3, rollout(2))]
    for name in ("loss", "learner/loss", "actor/", "actor"):  # outside the namespaces
        with pytest.raises(AssertionError, match="none of"):
            opened(tmp_path).log(1, {name: 1.0})


# The journal.

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

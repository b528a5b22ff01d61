"""The rollout journal: each RL step's graded groups, committed before the update that uses them.

After a kill, journalled steps after the last checkpoint are replayed from here instead of being generated again. That
also makes a resumed run equal to an uninterrupted one where grading reached a time limit: the groups are journalled
with their rewards. The journal holds every sample of a run with its lineage, one parquet file per step, complete or
absent. Groups that a step leaves open (`rl.partial_rollout_tokens`) are in a file beside it, from which the next step
continues them, also without a kill.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from luffy.files import replacing
from luffy.types import FinishReason, Group, Outcome, Source, Start, Trajectory

_SCHEMA = pa.schema(
    [
        pa.field("uid", pa.string(), nullable=False),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("response_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("source", pa.list_(pa.int8()), nullable=False),
        # float64 returns exactly the numbers of the engine.
        pa.field("logp_behavior", pa.list_(pa.float64()), nullable=False),
        pa.field("weight_version", pa.list_(pa.int32()), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("measures", pa.map_(pa.string(), pa.float64())),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("displaced", pa.bool_(), nullable=False),
        pa.field("start", pa.string()),
        pa.field("dose", pa.float64()),
        pa.field("hint", pa.string()),
        pa.field("context_starts", pa.list_(pa.int32())),
        pa.field("carried", pa.bool_()),
        pa.field("beside", pa.bool_()),
    ]
)


class RolloutJournal:
    """Groups by RL step in `directory` (`step_000012.parquet`, and `open_000012.parquet` for those left open)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def commit(self, step: int, groups: Sequence[Group]) -> None:
        """Make the groups of `step` durable: after this returns, a kill cannot lose them."""
        left_open = [group for group in groups if group.is_open]
        if left_open:
            _write(self._path(step, "open"), left_open)
        else:  # an interrupted attempt may have left some
            self._path(step, "open").unlink(missing_ok=True)
        _write(self._path(step), [group for group in groups if not group.is_open])

    def read(self, step: int) -> list[Group] | None:
        """The complete groups of `step` exactly as committed (perhaps []); None when the step was never committed."""
        return _read(self._path(step))

    def read_open(self, step: int) -> list[Group] | None:
        """The groups that `step` left open, for the next one; None when the step was never committed."""
        return (_read(self._path(step, "open")) or []) if self._path(step).exists() else None

    def read_group(self, step: int, index: int) -> Group | None:
        """Complete group `index` (from 0) of `step`, without reading others; None when it was never committed."""
        path = self._path(step)
        return _group(pq.ParquetFile(path).read_row_group(index).to_pylist()) if path.exists() else None

    def _path(self, step: int, kind: str = "step") -> Path:
        return self._directory / f"{kind}_{step:06d}.parquet"


def _write(path: Path, groups: Sequence[Group]) -> None:
    with replacing(path) as file, pq.ParquetWriter(file, _SCHEMA) as writer:
        for index, group in enumerate(groups):
            # A row group each, so that one group can be read without the others.
            writer.write_table(pa.Table.from_pylist(_rows(index, group), schema=_SCHEMA))


def _read(path: Path) -> list[Group] | None:
    if not path.exists():
        return None
    grouped: dict[int, list[dict]] = {}
    for row in pq.read_table(path).to_pylist():
        grouped.setdefault(row["group"], []).append(row)
    return [_group(rows) for rows in grouped.values()]


def _group(rows: Sequence[dict]) -> Group:
    beside = tuple(_trajectory(row) for row in rows if row.get("beside"))
    learned = [_trajectory(row) for row in rows if not (row["displaced"] or row.get("beside"))]
    others = [_trajectory(row) for row in rows if row["displaced"] and not row.get("beside")]
    return Group(
        rows[0]["uid"],
        tuple(row for row in learned if not row.has_failed),
        tuple(row for row in others if not row.has_failed),
        tuple(row for row in (*learned, *others) if row.has_failed),
        beside,
        bool(rows[0].get("carried")),
    )


def _rows(index: int, group: Group) -> list[dict[str, object]]:
    return [
        *(_row(index, group, row, displaced=False) for row in group.trajectories),
        *(_row(index, group, row, displaced=not row.is_correct, beside=True) for row in group.beside),
        *(_row(index, group, row, displaced=True) for row in (*group.replaced, *group.failed)),
    ]


def _row(
    index: int, group: Group, trajectory: Trajectory, *, displaced: bool, beside: bool = False
) -> dict[str, object]:
    start = trajectory.start
    return {
        "uid": group.uid,
        "prompt_ids": trajectory.prompt_ids,
        "response_ids": trajectory.response_ids,
        "source": [int(source) for source in trajectory.source],
        "logp_behavior": trajectory.logp_behavior,
        "weight_version": trajectory.weight_version,
        "reward": trajectory.reward,
        "outcome": trajectory.outcome.value,
        "finish_reason": trajectory.finish_reason.value,
        "measures": list(trajectory.measures.items()),
        "group": index,
        "displaced": displaced,
        "start": start.name if start else None,
        "dose": start.dose if start else None,
        "hint": start.shown if start else None,
        "context_starts": trajectory.context_starts or None,
        "carried": group.is_carried or None,
        "beside": beside or None,
    }


def _trajectory(row: dict) -> Trajectory:
    return Trajectory(
        prompt_ids=tuple(row["prompt_ids"]),
        response_ids=tuple(row["response_ids"]),
        source=tuple(Source(source) for source in row["source"]),
        logp_behavior=tuple(row["logp_behavior"]),
        weight_version=tuple(row["weight_version"]),
        reward=row["reward"],
        outcome=Outcome(row["outcome"]),
        finish_reason=FinishReason(row["finish_reason"]),
        measures=dict(row.get("measures") or ()),
        start=None if row.get("start") is None else Start(row["start"], row["dose"], row["hint"]),
        context_starts=tuple(row.get("context_starts") or ()),
    )

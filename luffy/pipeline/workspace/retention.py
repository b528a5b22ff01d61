"""Rules for which runs to discard, so that their results can be deleted."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from luffy.errors import DataError
from luffy.pipeline.workspace.records import RunRecord


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for keeping runs; by default all are kept."""

    keep_runs: int | None = None
    """Number of newest runs to keep of each experiment."""
    older_than_s: float | None = None
    """Keep runs that began less than this many seconds ago."""
    names: tuple[str, ...] = ()
    """Runs to delete, regardless of the two rules above."""
    all_checkpoints: bool = False
    """Finished stages keep only their newest checkpoint, even where `execution.checkpoint.keep` is larger."""

    def given_up(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        """The runs among `records` (newest first) to discard: beyond both limits, where both are given.

        The arms of a comparison are kept or discarded together with it. A run whose record cannot be read is discarded
        only by name, and a run that is under way not at all.

        Raises DataError for a name without a run, and for one of a run that is under way.
        """
        named = self._named(records)
        open_ended = ("running", "unreadable")
        comparing = tuple(f"{record.experiment}." for record in records if record.is_live and record.experiment)
        candidates = [
            record
            for record in records
            # A comparison that is under way may reuse what its arms made before.
            if record.condition not in open_ended and not record.experiment.startswith(comparing)
        ]
        going = {record.directory for record in candidates if self._is_over(record, records)} | named
        kept = [record for record in records if record.directory not in going]
        going -= {arm for record in kept for arm in record.arms.values()} - named
        return [record for record in records if record.directory in going]

    def _named(self, records: Sequence[RunRecord]) -> set[Path]:
        by_name = {record.name: record for record in records}
        for name in self.names:
            if name not in by_name:
                raise DataError(f"--runs {name}: no such run; luffy show lists them")
            if by_name[name].is_live:
                raise DataError(
                    f"--runs {name}: is under way (pid {by_name[name].pid} on {by_name[name].host}); end it first"
                )
        directories = {by_name[name].directory for name in self.names}
        arms = {arm for name in self.names for arm in by_name[name].arms.values()}
        return directories | {record.directory for record in records if record.directory in arms and not record.is_live}

    def _is_over(self, record: RunRecord, records: Sequence[RunRecord]) -> bool:
        limits = []
        if self.keep_runs is not None:
            limits.append(record not in _newest(records)[record.experiment][: self.keep_runs])
        if self.older_than_s is not None:
            limits.append(bool(record.started) and _age_s(record) > self.older_than_s)
        return bool(limits) and all(limits)


def _newest(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """The records by experiment, newest first."""
    found: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.started, reverse=True):
        found[record.experiment].append(record)
    return found


def _age_s(record: RunRecord) -> float:
    began = datetime.fromisoformat(record.started)
    return (datetime.now(began.tzinfo) - began).total_seconds()

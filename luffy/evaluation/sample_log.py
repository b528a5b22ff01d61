"""The records of an unfinished evaluation: appended batch by batch, and which of them count after a kill."""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from luffy.evaluation.sample_records import SampleRecord, parse_record, record_line
from luffy.files import sync_directory

Key = tuple[str, int, int]
"""Problem, sample and seed."""


class SampleLog:
    """The records of one suite under one decoding, in the order of generation.

    Each `append` is a batch, durable when it returns. A kill leaves whole batches and at most a torn one. `kept` is
    called with the number of records that count from an earlier attempt. Only the records' offsets are held in memory.
    """

    def __init__(self, path: Path, kept: Callable[[int], None] = lambda count: None) -> None:
        self._path = path
        self._kept = kept
        self._ends = array("Q", [0])
        """Where each record ends in the file; the first one begins at 0."""

    def resume(self, order: Sequence[Key], batch_size: int) -> int:
        """Return how many records are kept of an earlier attempt: the first ones of `order`, in whole batches.

        A torn batch is dropped, so that its requests are batched as before: the last bits of an engine's results may
        depend on the batch. Records that do not match `order` are dropped, too.
        """
        ends = array("Q", [0])
        for key, (record, end) in zip(order, self._read(), strict=False):
            if key != (record.uid, record.sample, record.seed):
                break
            ends.append(end)
        found = len(ends) - 1
        whole = found if found == len(order) else found - found % batch_size
        is_new = not self._path.exists()
        with self._path.open("ab") as file:
            file.truncate(ends[whole])
        if is_new:
            sync_directory(self._path.parent)
        self._ends = ends[: whole + 1]
        self._kept(whole)
        return whole

    def append(self, records: Sequence[SampleRecord]) -> None:
        """Add a batch, after a `resume`; it survives a power cut as soon as this returns."""
        lines = [record_line(record) for record in records]
        with self._path.open("ab") as file:
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        for line in lines:
            self._ends.append(self._ends[-1] + len(line))

    def read(self, places: Iterable[int]) -> Iterator[SampleRecord]:
        """Yield the records at these positions of the order, one at a time from the file."""
        with self._path.open("rb") as file:
            for place in places:
                file.seek(self._ends[place])
                yield parse_record(file.read(self._ends[place + 1] - self._ends[place]))

    def remove(self) -> None:
        """Delete the file, once the records are kept elsewhere."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> Iterator[tuple[SampleRecord, int]]:
        """Each record with the offset of its end, up to the first torn line."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            end = 0
            for line in file:
                end += len(line)
                try:
                    record = parse_record(line)
                except (ValueError, KeyError, TypeError):
                    return
                if not line.endswith(b"\n"):
                    return
                yield record, end

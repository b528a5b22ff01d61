"""The row of one cell of an evaluation, from its records."""

from collections.abc import Iterable

from luffy.evaluation.results import ResultRow, SamplingProtocol, tally_cells
from luffy.evaluation.sample_records import SampleRecord


def result_row(
    records: Iterable[SampleRecord], confidence: float, protocol: SamplingProtocol | None = None
) -> ResultRow:
    """The row of records of one suite and decoding."""
    (tally,) = tally_cells(records).values()
    return tally.row(confidence, protocol)

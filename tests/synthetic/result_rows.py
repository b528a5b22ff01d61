"""Graded responses with chosen fields, and the row of one cell of an evaluation, from its records."""

from collections.abc import Iterable

from luffy.evaluation.results import ResultRow, SamplingProtocol, tally_cells
from luffy.evaluation.sample_files import SampleRecord


def sample_record(suite: str, uid: str, correct: bool = True, **fields: object) -> SampleRecord:
    """A graded response to a problem; `fields` differ from a greedy, short one."""
    plain: dict[str, object] = {
        "decoding": "greedy", "sample": 0, "seed": 1, "prompt": "1 +1", "response": "\\boxed{2}", "answer": "2",
        "ground_truth": "2", "outcome": "correct" if correct else "wrong", "reason": "", "finish_reason": "stop",
        "num_tokens": 10,
    }  # fmt: skip
    return SampleRecord(suite=suite, uid=uid, correct=correct, **{**plain, **fields})


def result_row(
    records: Iterable[SampleRecord], confidence: float, protocol: SamplingProtocol | None = None
) -> ResultRow:
    """The row of records of one suite and decoding."""
    (tally,) = tally_cells(records).values()
    return tally.row(confidence, protocol)

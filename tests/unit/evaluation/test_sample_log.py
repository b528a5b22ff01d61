"""What is kept of an evaluation that was killed: whole batches, in the order in which they are asked for."""

from dataclasses import replace
from pathlib import Path

import pytest

from luffy.evaluation.sample_log import SampleLog
from luffy.evaluation.sample_records import SampleRecord, record_line

RECORD = SampleRecord(
    suite="s", decoding="d", uid="p0", sample=0, seed=0, prompt="p\n", response="r\u2028\\boxed{1}", answer="1",
    ground_truth="1", outcome="correct", reason="", correct=True, finish_reason="stop", num_tokens=4,
)  # fmt: skip
RECORDS = [replace(RECORD, uid=f"p{i}", seed=i) for i in range(7)]
ORDER = [(record.uid, record.sample, record.seed) for record in RECORDS]


def killed_after(path: Path, batches: int, torn: bytes = b"") -> SampleLog:
    log = SampleLog(path)
    for start in range(0, 3 * batches, 3):
        log.append(RECORDS[start : start + 3])
    with path.open("ab") as file:
        file.write(torn)
    return SampleLog(path)


@pytest.mark.parametrize(
    "torn",
    [b"", record_line(RECORDS[6])[:-20], record_line(RECORDS[6])[:-1], b'{"uid": 3}\n', b"5\n", b"\0\0\0\n"],
)
def test_whole_batches_are_kept_and_a_torn_one_is_dropped(tmp_path: Path, torn: bytes) -> None:
    log = killed_after(tmp_path / "log.jsonl", 2, torn)
    assert log.resume(ORDER, 3) == 6
    assert list(log.read(range(6))) == RECORDS[:6]
    log.append(RECORDS[6:])
    assert list(log.read([6, 0, 3])) == [RECORDS[6], RECORDS[0], RECORDS[3]]
    assert SampleLog(tmp_path / "log.jsonl").resume(ORDER, 3) == 7


def test_a_batch_of_which_a_part_was_written_is_asked_again_whole(tmp_path: Path) -> None:
    log = killed_after(tmp_path / "log.jsonl", 1, record_line(RECORDS[3]) + record_line(RECORDS[4]))
    assert log.resume(ORDER, 3) == 3
    assert (tmp_path / "log.jsonl").read_bytes().count(b"\n") == 3


def test_with_another_batch_size_what_makes_whole_batches_is_kept(tmp_path: Path) -> None:
    assert killed_after(tmp_path / "log.jsonl", 2).resume(ORDER, 4) == 4


def test_records_of_other_draws_do_not_count(tmp_path: Path) -> None:
    log = killed_after(tmp_path / "log.jsonl", 2)
    other = [*ORDER[:3], ("p3", 0, 99), *ORDER[4:]]
    assert log.resume(other, 1) == 3


def test_an_evaluation_starts_without_a_log_and_is_told_what_was_kept(tmp_path: Path) -> None:
    counts: list[int] = []
    log = SampleLog(tmp_path / "log.jsonl", counts.append)
    assert log.resume(ORDER, 3) == 0
    log.append(RECORDS[:3])
    assert log.resume(ORDER, 3) == 3
    assert counts == [0, 3]
    log.remove()
    assert list(tmp_path.iterdir()) == []

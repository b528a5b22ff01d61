"""Files of graded responses: compressed, joined by their bytes, read one by one, and never half there."""

import subprocess
from collections.abc import Iterator

import pytest
from synthetic.result_rows import sample_record

from luffy.errors import DataError
from luffy.evaluation import sample_files
from luffy.evaluation.sample_files import (
    SAMPLES_FILE,
    SampleRecord,
    read_sample_records,
    read_samples_of,
    record_line,
    write_sample_records,
)

RECORDS = [sample_record("s", f"p{i}", prompt="p\n", response=f"{i}\u2028" * 200) for i in range(50)]


@pytest.fixture(params=[1, 5000, 4 << 20])
def block(request, monkeypatch) -> None:
    """One record a block, several, all of them."""
    monkeypatch.setattr(sample_files, "_BLOCK_BYTES", request.param)


def test_files_give_back_what_was_written_alone_and_joined(tmp_path, block):
    first, second = tmp_path / "1.jsonl.zst", tmp_path / "2.jsonl.zst"
    write_sample_records(first, RECORDS[:20])
    write_sample_records(second, iter(RECORDS[20:]))
    write_sample_records(tmp_path / SAMPLES_FILE, RECORDS[:20], iter(RECORDS[20:]))
    assert list(read_sample_records(first)) == RECORDS[:20]
    assert list(read_samples_of(tmp_path)) == RECORDS
    assert (tmp_path / SAMPLES_FILE).read_bytes() == first.read_bytes() + second.read_bytes()


def test_the_tools_of_the_system_read_them(tmp_path, block):
    write_sample_records(tmp_path / SAMPLES_FILE, RECORDS)
    try:
        found = subprocess.run(["zstd", "-dc", tmp_path / SAMPLES_FILE], capture_output=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("needs zstd")
    assert found == b"".join(map(record_line, RECORDS))


def test_the_same_records_are_the_same_bytes_and_fewer(tmp_path):
    for name in ("a.zst", "b.zst"):
        write_sample_records(tmp_path / name, RECORDS)
    assert (tmp_path / "a.zst").read_bytes() == (tmp_path / "b.zst").read_bytes()
    assert (tmp_path / "a.zst").stat().st_size < 0.2 * sum(len(record_line(record)) for record in RECORDS)


def test_a_file_of_an_earlier_version_is_read_where_there_is_no_other(tmp_path):
    (tmp_path / "samples.jsonl").write_bytes(b"".join(map(record_line, RECORDS[:2])))
    assert list(read_samples_of(tmp_path)) == RECORDS[:2]
    write_sample_records(tmp_path / SAMPLES_FILE, RECORDS)
    assert list(read_samples_of(tmp_path)) == RECORDS


def test_nothing_is_left_of_records_that_end_in_an_error(tmp_path, block):
    def failing() -> Iterator[SampleRecord]:
        yield from RECORDS[:30]
        raise DataError("no more")

    with pytest.raises(DataError, match="no more"):
        write_sample_records(tmp_path / SAMPLES_FILE, failing())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda content: b"{}\n" + content])
def test_a_damaged_file_is_named_and_not_read_as_a_shorter_one(tmp_path, damage):
    write_sample_records(tmp_path / SAMPLES_FILE, RECORDS)
    content = (tmp_path / SAMPLES_FILE).read_bytes()
    (tmp_path / SAMPLES_FILE).write_bytes(damage(content))
    with pytest.raises(DataError, match=r"samples\.jsonl\.zst: holds no graded responses"):
        list(read_samples_of(tmp_path))


def test_a_folder_without_samples_is_named(tmp_path):
    with pytest.raises(DataError, match=r"has no samples\.jsonl\.zst"):
        list(read_samples_of(tmp_path))

"""`samples.jsonl.zst`: the graded responses of an evaluation, a line each (`zstdcat FILE | head`).

Compressed in blocks that stand alone (zstd frames): neither who writes nor who reads holds more than a block.
"""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from luffy.errors import DataError
from luffy.evaluation.sample_records import SampleRecord, parse_record, record_line
from luffy.files import replacing

SAMPLES_FILE = "samples.jsonl.zst"
_PLAIN_FILE = "samples.jsonl"
"""What an earlier version called it."""
_COMPRESSED = ".zst"
_MAX_LINE_BYTES = 1 << 28
_BLOCK_BYTES = 4 << 20
"""Size of a block: large enough for many responses to a problem, which repeat its prompt."""
_LEVEL = 3


def find_samples(directory: Path) -> Path | None:
    """The file of graded responses in the directory of an evaluation; None where it has none."""
    files = (directory / SAMPLES_FILE, directory / _PLAIN_FILE)
    return next((file for file in files if file.is_file()), None)


def read_samples_of(directory: Path) -> Iterator[SampleRecord]:
    """Yield the graded responses of a finished evaluation, a suite and decoding after the other.

    Raises DataError where there are none, or the file is damaged.
    """
    path = find_samples(directory)
    if path is None:
        raise DataError(f"{directory}: has no {SAMPLES_FILE}")
    try:
        yield from read_sample_records(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: holds no graded responses ({error})") from None


def read_sample_records(path: Path) -> Iterator[SampleRecord]:
    """Yield the records of a file, compressed or not.

    Raises OSError, ValueError, KeyError or TypeError when it is not what `write_sample_records` wrote.
    """
    with _open(path) as file:
        yield from map(parse_record, _lines(file))


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines; ValueError for a decompression bomb: a few kilobytes of zstd can hold gigabytes."""
    while line := file.readline(_MAX_LINE_BYTES):
        if len(line) == _MAX_LINE_BYTES:
            raise ValueError(f"a line is longer than {_MAX_LINE_BYTES} bytes")
        yield line


def write_sample_records(path: Path, *cells: Iterable[SampleRecord]) -> None:
    """Write the records as they come, those of each cell in blocks of their own: all of them or nothing."""
    import pyarrow as pa  # flows, which show samples, start without it

    codec = pa.Codec("zstd", compression_level=_LEVEL)
    with replacing(path) as file:
        for records in cells:
            for block in _blocks(map(record_line, records)):
                file.write(codec.compress(block, asbytes=True))


def _blocks(lines: Iterable[bytes]) -> Iterator[bytes]:
    waiting, size = [], 0
    for line in lines:
        waiting.append(line)
        size += len(line)
        if size >= _BLOCK_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def _open(path: Path) -> IO[bytes]:
    if path.suffix != _COMPRESSED:
        return path.open("rb")
    import pyarrow as pa  # as above

    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), 1 << 16)

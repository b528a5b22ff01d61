"""Prepared prompts on disk.

write_prompts(path, prompts)    # atomic
prompts = read_prompts(path)
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from luffy.data.schema import COLUMNS, REQUIRED_COLUMNS, SCHEMA, RowError, prompt_from_row, record_batch
from luffy.errors import DataError
from luffy.files import replacing
from luffy.types import Prompt

ROWS_AT_ONCE = 16_384
"""Rows held in memory beside the prompts themselves; also the row group of a written file."""

_OWN_COLUMNS = tuple(name for name in COLUMNS if name != "target")  # it only repeats the first trace


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> int:
    """Write the prompts to `path` with `SCHEMA`; returns how many. A reader sees the whole file or none of it."""
    with replacing(path) as file:
        return _write(file, prompts)


def read_prompts(path: Path) -> list[Prompt]:
    """Return all prompts of a file made by `write_prompts`; DataError names the file, row (from 1) and field."""
    prompts = []
    for number, row in enumerate(_rows(_open(path), _OWN_COLUMNS), start=1):
        try:
            if isinstance(row, RowError):
                raise row
            prompts.append(prompt_from_row(row))
        except RowError as error:
            raise DataError(
                f"{path}, row {number}, field {error.field}: {error.reason}; prepare the data again"
            ) from None
    return prompts


def read_rows(path: Path, max_rows: int | None = None) -> Iterator[Mapping[str, object] | RowError]:
    """Yield the rows of any parquet file with the needed columns; a row with undecodable text as a `RowError`.

    Raises DataError where the file is missing, is no parquet or lacks a column.
    """
    return itertools.islice(_rows(_open(path), COLUMNS), max_rows)


def _write(file: IO[bytes], prompts: Iterable[Prompt]) -> int:
    count = 0
    remaining = iter(prompts)
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        while chunk := list(itertools.islice(remaining, ROWS_AT_ONCE)):
            writer.write_batch(record_batch(chunk))
            count += len(chunk)
    return count


def _open(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: is no readable parquet file ({_first_line(error)})") from None
    missing = [name for name in REQUIRED_COLUMNS if name not in file.schema_arrow.names]
    if missing:
        raise DataError(
            f"{path}: column {', '.join(missing)} missing; found {', '.join(file.schema_arrow.names)} "
            "(the columns of LUFFY/verl are needed)"
        )
    return file


def _rows(file: pq.ParquetFile, wanted: Sequence[str]) -> Iterator[Mapping[str, object] | RowError]:
    columns = [name for name in wanted if name in file.schema_arrow.names]
    with file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns):
            try:
                yield from batch.to_pylist()
            except UnicodeDecodeError:
                yield from (_decoded_row(batch, index) for index in range(batch.num_rows))


def _decoded_row(batch: pa.RecordBatch, index: int) -> Mapping[str, object] | RowError:
    row: dict[str, object] = {}
    for name in batch.schema.names:
        try:
            row[name] = batch.column(name)[index].as_py()
        except UnicodeDecodeError as error:
            return RowError(name, f"is no UTF-8 text (byte {error.start})")
    return row


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

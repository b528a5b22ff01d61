"""Prepared prompts on disk, and the reading of any parquet file of rows.

write_prompts(path, prompts)    # atomic
prompts = read_prompts(path)
files = suite_files(folder, None)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from luffy.confidential import CONFIDENTIAL, is_confidential
from luffy.config.evaluation import VALIDATION
from luffy.data.schema import (
    COLUMNS,
    REQUIRED_COLUMNS,
    SCHEMA,
    RowError,
    present_columns,
    prompt_from_row,
    record_batch,
)
from luffy.errors import DataError, first_line
from luffy.files import replacing
from luffy.json_text import parse_json
from luffy.types import Prompt

ROWS_AT_ONCE = 16_384
"""Rows of a written row group, if they are short."""
_BYTES_AT_ONCE = 8 << 20
"""Characters of a written row group."""
_READ_ROWS = 256
_READ_BYTES = 64 << 20
"""Text read at once, by the mean size of a row group's rows."""
_MAX_DICTIONARY_BYTES = 32 << 20
"""Compressed size of the distinct values of a column: writers stop at about 1 MiB, and each may stand for many rows."""
_MAX_UNFOLDED_BYTES, _MAX_UNFOLDED = 64 << 20, 1000
"""A column larger than this, and this many times as large as in the file, is a decompression bomb."""
_BUFFER_BYTES = 1 << 20
_NO_VALUE = (ValueError, OverflowError, KeyError)
"""Raised for values that Python does not have: undecodable text, dates after the year 9999, unknown time zones, maps
with a key twice."""
Item = TypeVar("Item")

_OWN_COLUMNS = tuple(name for name in COLUMNS if name != "target")  # it only repeats the first trace


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> int:
    """Write the prompts to `path` with `SCHEMA`; returns how many. A reader sees the whole file or none of it."""
    return write_tables(path, map(record_batch, chunked(prompts, text_size)))


def write_tables(path: Path, tables: Iterable[pa.Table | pa.RecordBatch]) -> int:
    """Write the rows of `tables` in the same way, a row group each; returns how many."""
    count = 0
    with replacing(path) as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for table in tables:
            if table.num_rows:
                writer.write(table)
                count += table.num_rows
    return count


def read_prompts(path: Path) -> list[Prompt]:
    """Return all prompts of a file made by `write_prompts`; DataError names the file, row (from 1) and field."""
    return list(iterate_prompts(path))


def iterate_prompts(path: Path) -> Iterator[Prompt]:
    """Yield what `read_prompts` returns, a few rows in memory at a time."""
    for number, row in enumerate(read_rows(path, _OWN_COLUMNS, REQUIRED_COLUMNS), start=1):
        try:
            if isinstance(row, RowError):
                raise row
            yield prompt_from_row(row)
        except RowError as error:
            raise DataError(
                f"{path}, row {number}, field {error.field}: {error.reason}; prepare the data again"
            ) from None


def read_rows(
    path: Path, columns: Sequence[str] | None, required: Sequence[str]
) -> Iterator[Mapping[str, object] | RowError]:
    """Yield the rows of any parquet file, a few in memory at a time.

    A row with a value that Python does not have, such as undecodable text, is a `RowError`. Only `present_columns` are
    read, all columns for None. Raises DataError where the file is missing, is not parquet, is truncated or lacks one of
    the `required` columns.
    """
    try:
        # With a buffer, a column of a large row group is read piece by piece.
        file = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES)
        names = file.schema_arrow.names
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is no readable parquet file ({first_line(error)})") from None
    hint = "the columns of LUFFY/verl are needed, or fields that map others" if "prompt" in required else "fields"
    require_columns(required, names, str(path), f" ({hint})")
    present = names if columns is None else present_columns(columns, names)
    count = 0
    with file:
        try:
            sizes = [
                _rows_at_once(path, file.metadata.row_group(index), present) for index in range(file.num_row_groups)
            ]
            for index, rows_at_once in enumerate(sizes):
                for batch in file.iter_batches(batch_size=rows_at_once, row_groups=[index], columns=present):
                    yield from decoded(batch)
                    count += batch.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read after row {count} ({first_line(error)})") from None


def require_columns(required: Sequence[str], found: Sequence[str], where: str, hint: str = "") -> None:
    """Raise DataError, which begins with `where`, if a required column is not among those that were found."""
    if missing := [name for name in required if name not in found]:
        raise DataError(f"{where}: column {', '.join(missing)} missing; found {', '.join(found)}{hint}")


def decoded(batch: pa.RecordBatch) -> Iterator[Mapping[str, object] | RowError]:
    """Yield the rows of a batch; one with a value that Python does not have as a `RowError`."""
    short = {column.name: column.type for column in batch.schema if _holds_short(column.type)}
    for row in _rows_of(batch):
        if short and not isinstance(row, RowError):
            yield {**row, **{name: _as_written(row[name], kind) for name, kind in short.items()}}
        else:
            yield row


def _rows_of(batch: pa.RecordBatch) -> Iterator[Mapping[str, object] | RowError]:
    try:
        yield from batch.to_pylist(maps_as_pydicts="strict")
    except _NO_VALUE:
        for index in range(batch.num_rows):
            row: dict[str, object] = {}
            try:
                for name in batch.schema.names:
                    row[name] = batch.column(name)[index].as_py(maps_as_pydicts="strict")
            except UnicodeDecodeError as error:
                yield RowError(name, f"is not UTF-8 text (byte {error.start})")
            except _NO_VALUE as error:
                yield RowError(name, f"cannot be read: {error}")
            else:
                yield row


def _holds_short(kind: pa.DataType) -> bool:
    """Whether values of the type have floats of 16 or 32 bits in them."""
    is_short = pa.types.is_float32(kind) or pa.types.is_float16(kind)
    return is_short or any(_holds_short(kind.field(index).type) for index in range(kind.num_fields))


def _as_written(value: Any, kind: pa.DataType) -> Any:
    """As doubles such floats would have digits that nobody has written: 0.1 as 0.10000000149011612."""
    if value is None or not _holds_short(kind):
        return value
    if pa.types.is_struct(kind):
        return {part.name: _as_written(value[part.name], part.type) for part in kind}
    if pa.types.is_map(kind):
        return {key: _as_written(each, kind.item_type) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_written(each, kind.value_type) for each in value]
    return float(str((np.float32 if pa.types.is_float32(kind) else np.float16)(value)))


def chunked(prompts: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Split a sequence into chunks for one write: `ROWS_AT_ONCE` rows or `_BYTES_AT_ONCE` of text."""
    chunk: list[Item] = []
    size = 0
    for item in prompts:
        chunk.append(item)
        size += size_of(item)
        if len(chunk) == ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def text_size(prompt: Prompt) -> int:
    """Return the characters of a prompt and its traces; a log-probability counts as eight."""
    traces = sum(len(trace.text) + 8 * len(trace.logprobs or ()) for trace in prompt.traces)
    return traces + sum(len(message.content) for message in prompt.messages)


def _rows_at_once(path: Path, group: pq.RowGroupMetaData, columns: Sequence[str]) -> int:
    """How many rows of a row group to read at once; DataError for a decompression bomb.

    Arrow puts no more than 2 GiB of text into one array, and refuses nested columns whose batch holds more.
    """
    parts = (group.column(index) for index in range(group.num_columns))
    wanted = [part for part in parts if part.path_in_schema.partition(".")[0] in columns]
    largest = 0
    for part in wanted:
        size, stored = part.total_uncompressed_size, max(part.total_compressed_size, 1)
        distinct = part.data_page_offset - part.dictionary_page_offset if part.has_dictionary_page else 0
        if size > _MAX_UNFOLDED_BYTES and size > _MAX_UNFOLDED * stored:
            raise DataError(
                f"{path}: column {part.path_in_schema} expands from {stored} to {size} bytes, like a decompression "
                "bomb, and is not read; if you trust the file, write it again without compression and without "
                "dictionaries, or as JSON Lines"
            )
        if distinct > _MAX_DICTIONARY_BYTES:
            raise DataError(
                f"{path}: column {part.path_in_schema} has a dictionary of {distinct} bytes, of which at most "
                f"{_MAX_DICTIONARY_BYTES} are read, since any number of rows may repeat its values; write the file "
                "again without dictionaries, or as JSON Lines"
            )
        largest = max(largest, distinct, size // max(group.num_rows, 1))
    return min(_READ_ROWS, max(1, _READ_BYTES // max(largest, 1)))


VALIDATION_FILE = f"{VALIDATION}.parquet"


def suite_files(data: Path, only: Sequence[str] | None) -> dict[str, Path]:
    """The files of the suites in the prepared `data` by name: all of them, sorted, or those in `only`, in that order.

    Raises DataError for a suite that is missing.
    """
    files = {path.stem: path for path in sorted((data / "suites").glob("*.parquet"))}
    if only is None:
        return files
    held_out = {VALIDATION: data / VALIDATION_FILE} if (data / VALIDATION_FILE).is_file() else {}
    files = held_out | files
    missing = [name for name in only if name not in files]
    if missing:
        raise DataError(f"{data}: no suite {missing[0]}; there are {', '.join(files) or 'none'}")
    return {name: files[name] for name in only}


def shown_references(file: Path) -> dict[str, str | None]:
    """The reference answer of each prompt in `train.parquet` or a suite's file, by uid; None for a confidential one."""
    rows = pq.read_table(file, columns=["uid", "data_source", "extra_info", "reward_model"]).to_pylist()
    marked = (bool(parse_json(row["extra_info"] or "{}").get(CONFIDENTIAL)) for row in rows)
    return {
        row["uid"]: None if is_confidential(row["data_source"], marked=mark) else row["reward_model"]["ground_truth"]
        for row, mark in zip(rows, marked, strict=True)
    }

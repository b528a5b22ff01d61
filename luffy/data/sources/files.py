"""Prompts from local files: `.parquet`, `.jsonl` with one object a line, `.csv` with a header.

Their columns are those of LUFFY and verl, or whatever `fields` maps.
"""

import csv
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from luffy.config.data import FieldsConfig, FileSource
from luffy.config.shipped import expand_pattern
from luffy.data.parquet import read_rows
from luffy.data.schema import COLUMNS, REQUIRED_COLUMNS, RowError, prompt_from_row
from luffy.data.sources.fields import columns_of, prompt_from_fields
from luffy.data.sources.protocol import QuarantinedRow, Row
from luffy.errors import DataError

NumberedRow = tuple[str, int, Mapping[str, object] | RowError]
"""File, row from 1, content."""
_CSV_FIELD_BYTES = 1 << 27


class FilePrompts:
    """A file's prompts in its order, the same for every seed; malformed rows are quarantined.

    `purpose` names the source in messages. DataError where the file is missing, is a directory, has another extension,
    lacks a column, breaks off or holds no usable row.
    """

    kind = "file"
    is_light = False

    def __init__(self, source: FileSource, purpose: str, seed: int) -> None:
        self._source, self._purpose = source, purpose
        self._paths = _paths(source.path, purpose)

    def inputs(self) -> dict[str, str]:
        """The files."""
        return {str(path): sha256_of(path) for path in self._paths}

    def rows(self) -> Iterator[Row]:
        """Read one row after another."""
        fields = self._source.fields
        numbered = itertools.islice(self._numbered(fields), self._source.max_rows)
        yield from prompts_of(numbered, fields, self._source.author, f"data.{self._purpose}: {self._source.path}")

    def _numbered(self, fields: FieldsConfig | None) -> Iterator[NumberedRow]:
        for path in self._paths:
            for number, row in _READERS[path.suffix](path, fields):
                yield str(path), number, row


def prompts_of(rows: Iterable[NumberedRow], fields: FieldsConfig | None, author: str, where: str) -> Iterator[Row]:
    """Yield each row as a prompt or quarantined; DataError, which names `where`, when none was usable."""
    usable, malformed, first = 0, 0, ""
    for file, number, row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            prompt = prompt_from_row(row, author) if fields is None else prompt_from_fields(row, fields, author)
        except RowError as error:
            malformed += 1
            first = first or f"row {number}, field {error.field}: {error.reason}"
            yield QuarantinedRow(file, number, error.field, error.reason)
        else:
            usable += 1
            yield prompt
    if not usable:
        raise DataError(
            f"{where}: none of its {malformed} rows can be used; the first: {first}"
            if malformed
            else f"{where}: holds no row"
        )


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _paths(path: str, purpose: str) -> list[Path]:
    found = expand_pattern(path)
    if not found:
        raise DataError(f"data.{purpose}: {path}: no such file (working directory {Path.cwd()})")
    allowed = ", ".join(_READERS)
    for file in found:
        if file.is_dir():
            raise DataError(f"data.{purpose}: {file} is a directory; give one file ({allowed}) or a pattern with *")
        if not file.is_file():
            raise DataError(f"data.{purpose}: {file}: no such file (working directory {Path.cwd()})")
        if file.suffix not in _READERS:
            raise DataError(f"data.{purpose}: {file}: extension {file.suffix!r}; use one of {allowed}")
    return found


def _parquet_rows(path: Path, fields: FieldsConfig | None) -> Iterator[tuple[int, Mapping[str, object] | RowError]]:
    if fields is None:
        return enumerate(read_rows(path, COLUMNS, REQUIRED_COLUMNS), start=1)
    columns = columns_of(fields)
    return enumerate(read_rows(path, columns, columns), start=1)


def _jsonl_rows(path: Path, fields: FieldsConfig | None) -> Iterator[tuple[int, Mapping[str, object] | RowError]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if content.strip():
                yield number, _jsonl_row(content)


def _jsonl_row(line: bytes) -> Mapping[str, object] | RowError:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return RowError("(line)", f"is no UTF-8 text (byte {error.start + 1}: 0x{line[error.start]:02x})")
    except (ValueError, RecursionError) as error:
        return RowError("(line)", f"is no JSON: {error}")
    if not isinstance(row, Mapping):
        return RowError("(line)", f"must be a JSON object, found {type(row).__name__}")
    return row


def _csv_rows(path: Path, fields: FieldsConfig | None) -> Iterator[tuple[int, Mapping[str, object] | RowError]]:
    assert fields is not None, "refused by the configuration"
    csv.field_size_limit(_CSV_FIELD_BYTES)
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, strict=True)
            missing = [name for name in columns_of(fields) if name not in (reader.fieldnames or ())]
            if missing:
                found = ", ".join(reader.fieldnames or ())
                raise DataError(f"{path}: column {', '.join(missing)} missing; found {found}")
            for number, row in enumerate(reader, start=1):
                yield number, _csv_row(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: is no readable CSV from line {reader.line_num + 1} on ({error})") from None


def _csv_row(row: Mapping[str | None, object]) -> Mapping[str, object] | RowError:
    if None in row:
        return RowError("(row)", "has more values than the header has columns")
    # An empty cell is how CSV writes that there is nothing.
    return {str(name): value or None for name, value in row.items()}


_Reader = Callable[[Path, FieldsConfig | None], Iterator[tuple[int, Mapping[str, object] | RowError]]]
_READERS: dict[str, _Reader] = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows, ".csv": _csv_rows}

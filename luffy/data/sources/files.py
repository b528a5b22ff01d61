"""Prompts from a local file with the columns of LUFFY/verl: `.parquet`, or `.jsonl` with one object a line."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from luffy.config.data import FileSource
from luffy.data.parquet import read_rows
from luffy.data.schema import RowError, prompt_from_row
from luffy.data.sources.loaded import LoadedSource, QuarantinedRow
from luffy.errors import DataError
from luffy.types import Prompt

_READERS = (".parquet", ".jsonl")


def load_file(source: FileSource, purpose: str, seed: int) -> LoadedSource:
    """Return the file's prompts in its order; malformed rows are quarantined.

    `purpose` names the source in messages; a file gives the same rows for every seed. DataError where the file is
    missing, is a directory, has another extension or holds no usable row.
    """
    path = Path(source.path).expanduser()
    _check(path, purpose)
    prompts: list[Prompt] = []
    quarantined: list[QuarantinedRow] = []
    for number, row in _numbered_rows(path, source.max_rows):
        try:
            if isinstance(row, RowError):
                raise row
            prompts.append(prompt_from_row(row, source.author))
        except RowError as error:
            quarantined.append(QuarantinedRow(str(path), number, error.field, error.reason))
    if not prompts:
        raise DataError(f"data.{purpose}: {path}: {_emptiness(quarantined)}")
    return LoadedSource("file", prompts, _sha256(path), quarantined)


def _check(path: Path, purpose: str) -> None:
    allowed = " or ".join(_READERS)
    if path.is_dir():
        raise DataError(f"data.{purpose}: {path} is a directory; give one {allowed} file")
    if not path.is_file():
        raise DataError(f"data.{purpose}: {path}: no such file (working directory {Path.cwd()})")
    if path.suffix not in _READERS:
        raise DataError(f"data.{purpose}: {path}: extension {path.suffix!r}; use {allowed}")


def _numbered_rows(path: Path, max_rows: int | None) -> Iterator[tuple[int, Mapping[str, object] | RowError]]:
    if path.suffix == ".parquet":
        return enumerate(read_rows(path, max_rows), start=1)
    return itertools.islice(_jsonl_rows(path), max_rows)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Mapping[str, object] | RowError]]:
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


def _emptiness(quarantined: list[QuarantinedRow]) -> str:
    if not quarantined:
        return "holds no row"
    first = quarantined[0]
    return (
        f"none of its {len(quarantined)} rows can be used; the first: row {first.row}, "
        f"field {first.field}: {first.reason}"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

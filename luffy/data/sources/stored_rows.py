"""Prompts from local files (`.parquet`, `.jsonl` with one object per line, `.csv` with a header) and from the hub.

Columns are those of LUFFY and verl, those of another well-known layout (`recognised`), or those that `fields` maps. A
dataset on the Hugging Face hub, or in a local folder, is read with the package `datasets` (pip install
'luffy-rl[hub]'). Its rows are memory-mapped from the cache of `datasets`; once fetched, they are available offline
(`HF_HUB_OFFLINE=1`).
"""

import csv
import dataclasses
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from luffy.confidential import CONFIDENTIAL
from luffy.config.data import FileSource, HubSource
from luffy.config.shipped import expand_pattern
from luffy.data.parquet import decoded, read_rows, require_columns
from luffy.data.schema import COLUMNS, REQUIRED_COLUMNS, RowError, as_text, present_columns, prompt_from_row, value_at
from luffy.data.sources import QuarantinedRow, Row
from luffy.data.sources.column_mapping import PARTS_OF_A_QUESTION, columns_of, prompt_from_fields, recognised
from luffy.errors import DataError
from luffy.json_text import parse_json
from luffy.pipeline.manifest import hash_file

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)
NumberedRow = tuple[str, int, Mapping[str, object] | RowError]
"""File, row from 1, content."""
_Numbered = tuple[int, Mapping[str, object] | RowError]
_CSV_FIELD_BYTES = 1 << 27
_MAX_VALUES_NAMED = 10
_ROWS_LOOKED_AT = 1000
"""First rows of each file, which tell its layout and the columns that are not read."""
_WITHHELD = "cannot be used (the source is confidential: the reason is not shown)"


class FilePrompts:
    """The prompts in the file's order, the same for every seed; malformed rows are quarantined.

    `purpose` names the source in messages. DataError if the file is missing, is a directory, has an unknown extension,
    lacks a column, is truncated or holds no usable row.
    """

    kind = "file"
    is_light = False

    def __init__(self, source: FileSource, purpose: str, seed: int) -> None:
        self._source, self._purpose = source, purpose
        self._paths = expand_pattern(source.path)
        if not self._paths:
            raise DataError(f"data.{purpose}: {source.path}: no such file (working directory {Path.cwd()})")
        allowed = ", ".join(READERS)
        for file in self._paths:
            if file.is_dir():
                raise DataError(f"data.{purpose}: {file} is a directory; give one file ({allowed}) or a pattern with *")
            if not file.is_file():
                raise DataError(f"data.{purpose}: {file}: no such file (working directory {Path.cwd()})")
            if file.suffix not in READERS:
                raise DataError(f"data.{purpose}: {file}: extension {file.suffix!r}; use one of {allowed}")

    def inputs(self) -> dict[str, str]:
        return {str(path): hash_file(path) for path in self._paths}

    def rows(self) -> Iterator[Row]:
        where = f"data.{self._purpose}: {self._source.path}"
        heads = ((row for _, row in READERS[path.suffix](path, None, ())) for path in self._paths)
        head = [row for rows in heads for row in itertools.islice(rows, _ROWS_LOOKED_AT) if isinstance(row, Mapping)]
        source = with_fields(self._source, head, self._paths[0].stem, where)
        wanted, required = columns_to_read(source)
        self.unread = unread_columns(head, wanted)
        numbered = (
            (str(path), number, row)
            for path in self._paths
            for number, row in READERS[path.suffix](path, wanted, required)
        )
        return prompts_of(numbered, source, where)


_Source = TypeVar("_Source", FileSource, HubSource)


def with_fields(source: _Source, rows: Iterable[Mapping[str, object]], data_source: str, where: str) -> _Source:
    """Return the source with the `fields` that its first rows call for, unchanged where it needs none.

    DataError, with the fields to give, for columns that are not known.
    """
    if source.fields is not None:
        return source
    head = list(rows)
    names: list[str] = list(dict.fromkeys(name for row in head for name in row))
    if not names or {*REQUIRED_COLUMNS} <= {*names}:
        return source
    fields, text = recognised(head, data_source)
    if fields is None:
        beside = ", ".join(name for name in names if name in PARTS_OF_A_QUESTION)
        advice = f"; what {beside} holds has to be part of the problem" if beside else ""
        raise DataError(
            f"{where}: columns {', '.join(names)} are of no known layout; name them with fields: {text}{advice}"
        )
    logger.info("%s: read as fields: %s", where, text)
    return source.model_copy(update={"fields": fields})


def unread_columns(rows: Iterable[Mapping[str, object]], wanted: Sequence[str]) -> dict[str, int]:
    """The columns of the first rows that are not among `wanted`, with the number of rows that have a value there."""
    found = Counter(name for row in rows for name, value in row.items() if value not in (None, "", [], {}))
    return {name: count for name, count in sorted(found.items()) if name not in wanted}


def columns_to_read(source: FileSource | HubSource) -> tuple[list[str], list[str]]:
    """Return the columns to read if present, and those that are required."""
    filtered = [column.partition(".")[0] for column in source.only]
    if source.fields is not None:
        needed = list(dict.fromkeys((*columns_of(source.fields), *filtered)))
        return needed, needed
    return list(dict.fromkeys((*COLUMNS, *filtered))), list(dict.fromkeys((*REQUIRED_COLUMNS, *filtered)))


def prompts_of(rows: Iterable[NumberedRow], source: FileSource | HubSource, where: str) -> Iterator[Row]:
    """Yield each selected row, as a prompt or quarantined; DataError, naming `where`, if none is usable."""
    usable, malformed, first = 0, 0, ""
    for file, number, row in itertools.islice(_selected(rows, source, where), source.max_rows):
        try:
            if isinstance(row, RowError):
                raise row
            fields, author = source.fields, source.author
            prompt = prompt_from_row(row, author) if fields is None else prompt_from_fields(row, fields, author)
            if source.confidential:
                prompt = dataclasses.replace(prompt, extra_info={**prompt.extra_info, CONFIDENTIAL: True})
        except RowError as error:
            reason = _WITHHELD if source.confidential else error.reason
            malformed += 1
            first = first or f"row {number}, field {error.field}: {reason}"
            yield QuarantinedRow(file, number, error.field, reason)
        else:
            usable += 1
            yield prompt
    if not usable:
        raise DataError(
            f"{where}: none of its {malformed} rows can be used; the first: {first}"
            if malformed
            else f"{where}: holds no row"
        )


def _selected(rows: Iterable[NumberedRow], source: FileSource | HubSource, where: str) -> Iterator[NumberedRow]:
    """The rows that match `only`, compared as text, since CSV has no other type; unreadable ones, to be quarantined."""
    if not source.only:
        yield from rows
        return
    allowed = {
        column: {str(as_text(value)) for value in (values if isinstance(values, tuple) else (values,))}
        for column, values in source.only.items()
    }
    seen: dict[str, dict[str, None]] = {column: {} for column in allowed}
    count = 0
    for file, number, row in rows:
        found = {} if isinstance(row, RowError) else {column: str(as_text(value_at(row, column))) for column in allowed}
        if all(value in allowed[column] for column, value in found.items()):
            count += 1
            yield file, number, row
        elif not count:
            for column, value in found.items():
                seen[column][value] = None
    if not count:
        named = ""
        for column, values in ({} if source.confidential else seen).items():
            more = ", ..." if len(values) > _MAX_VALUES_NAMED else ""
            named += f"; {column} is {', '.join(itertools.islice(values, _MAX_VALUES_NAMED))}{more}"
        raise DataError(f"{where}: no row matches only: {dict(source.only)}{named}")


def _jsonl_rows(path: Path, wanted: Sequence[str] | None, required: Sequence[str]) -> Iterator[_Numbered]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not content.strip():
                continue
            try:
                row = parse_json(content.decode())
            except UnicodeDecodeError as error:
                reason = f"is not UTF-8 text (byte {error.start + 1}: 0x{content[error.start]:02x})"
            except ValueError as error:
                reason = f"is not JSON: {error}"
            else:
                if isinstance(row, Mapping):
                    yield number, row
                    continue
                reason = f"must be a JSON object, found {type(row).__name__}"
            yield number, RowError("(line)", reason)


def _csv_rows(path: Path, wanted: Sequence[str] | None, required: Sequence[str]) -> Iterator[_Numbered]:
    csv.field_size_limit(_CSV_FIELD_BYTES)
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, strict=True)
            require_columns(required, reader.fieldnames or (), str(path))
            for number, row in enumerate(reader, start=1):
                if None in row:
                    yield number, RowError("(row)", "has more values than the header has columns")
                else:  # CSV writes a missing value as an empty cell; a data source may be empty
                    yield (
                        number,
                        {str(name): value or (value if name == "data_source" else None) for name, value in row.items()},
                    )
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: is not readable CSV from line {reader.line_num + 1} on ({error})") from None


_Reader = Callable[[Path, Sequence[str] | None, Sequence[str]], Iterator[_Numbered]]
"""Takes the columns to read, None for all, and those that have to be there."""
READERS: dict[str, _Reader] = {
    ".parquet": lambda path, wanted, required: enumerate(read_rows(path, wanted, required), start=1),
    ".jsonl": _jsonl_rows,
    ".csv": _csv_rows,
}


_ROWS_AT_ONCE = 256


class HubPrompts:
    """The prompts in the dataset's order, the same for every seed; malformed rows are quarantined.

    DataError if `datasets` is not installed, the dataset cannot be loaded (with a hint for offline machines) or a
    column is missing.
    """

    kind = "hub"
    is_light = False

    def __init__(self, source: HubSource, purpose: str, seed: int) -> None:
        self._source, self._purpose = source, purpose
        self._dataset = _load(source, purpose)
        found = self._dataset.column_names
        where = f"data.{purpose}: {source.path}"
        head = [row for row in itertools.islice(self._decoded(found), _ROWS_LOOKED_AT) if isinstance(row, Mapping)]
        self._source = source = with_fields(source, head, source.path, where)
        wanted, required = columns_to_read(source)
        self.unread = unread_columns(head, wanted)
        require_columns(required, found, where, "; map them with fields")
        self._columns = present_columns(wanted, found)

    def inputs(self) -> dict[str, str]:
        files = [Path(str(file["filename"])) for file in self._dataset.cache_files]
        name = f"{self._source.path}@{self._source.revision}"
        digests = "".join(hash_file(file) for file in files)
        return {name: digests if len(files) == 1 else hashlib.sha256(digests.encode()).hexdigest()}

    def rows(self) -> Iterator[Row]:
        name = f"{self._source.path} ({self._source.split})"
        numbered = ((name, number, row) for number, row in enumerate(self._decoded(self._columns), start=1))
        return prompts_of(numbered, self._source, f"data.{self._purpose}: {self._source.path}")

    def _decoded(self, columns: Sequence[str]) -> Iterator[Mapping[str, object] | RowError]:
        tables = self._dataset.select_columns(list(columns)).with_format("arrow").iter(batch_size=_ROWS_AT_ONCE)
        return (row for table in tables for batch in table.to_batches() for row in decoded(batch))


def _load(source: HubSource, purpose: str) -> "Dataset":
    try:
        import datasets  # optional, and slow to import
    except ImportError:
        raise DataError(f"data.{purpose}: kind: hub needs the package datasets: pip install 'luffy-rl[hub]'") from None
    datasets.disable_progress_bars()
    local = Path(source.path).is_dir()
    try:
        # Not in memory, whatever HF_DATASETS_IN_MEMORY_MAX_SIZE says: `inputs` are the digests of the cached files.
        return datasets.load_dataset(
            source.path,
            source.name,
            split=source.split,
            revision=None if local else source.revision,
            keep_in_memory=False,
        )
    except Exception as error:  # noqa: BLE001 - the hub's client lets through the errors of several HTTP libraries
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"data.{purpose}: {source.path} (split {source.split}, revision {source.revision}) cannot be loaded: "
            f"{text[:200]}; without a network, give a local copy (kind: file; with a recipe: file: PATH), or fetch it "
            "once while online and set HF_HUB_OFFLINE=1"
        ) from None

"""Rows in a file, and all rows of a source in memory."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from luffy.config.data import FileSource, SourceConfig
from luffy.data.sources import QuarantinedRow, open_source
from luffy.types import Prompt


@dataclass(frozen=True, slots=True)
class LoadedSource:
    kind: str
    prompts: list[Prompt]
    inputs: dict[str, str]
    quarantined: list[QuarantinedRow]


def load_source(config: SourceConfig, purpose: str = "train", seed: int = 0) -> LoadedSource:
    source = open_source(config, purpose, seed)
    rows = list(source.rows())
    return LoadedSource(
        kind=source.kind,
        prompts=[row for row in rows if isinstance(row, Prompt)],
        inputs=source.inputs(),
        quarantined=[row for row in rows if isinstance(row, QuarantinedRow)],
    )


def load_file(path: Path, **settings: object) -> LoadedSource:
    return load_source(FileSource.model_validate({"kind": "file", "path": str(path), **settings}))


def write_rows(path: Path, *rows: Mapping[str, object]) -> Path:
    """In the format that the name ends in; the folder is made."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path

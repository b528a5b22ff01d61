"""Which prompts of a prepared file are confidential, without reading their texts."""

import json
from pathlib import Path

import pyarrow.parquet as pq

from luffy.confidential import CONFIDENTIAL, is_confidential


def confidential_uids(file: Path) -> frozenset[str]:
    """The uids of the confidential prompts in `train.parquet` or a suite's file."""
    table = pq.read_table(file, columns=["uid", "data_source", "extra_info"])
    return frozenset(
        row["uid"]
        for row in table.to_pylist()
        if is_confidential(row["data_source"], marked=_is_marked(row["extra_info"]))
    )


def _is_marked(extra_info: str | None) -> bool:
    return extra_info is not None and bool(json.loads(extra_info).get(CONFIDENTIAL))

"""Prompts from a dataset on the Hugging Face hub or in a local folder, read with the package `datasets`.

    pip install 'luffy-rl[hub]'

Rows are memory-mapped from the cache of `datasets`. Once fetched, they are available offline (`HF_HUB_OFFLINE=1`).
"""

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from luffy.config.data import HubSource
from luffy.data.parquet import decoded
from luffy.data.schema import present_columns
from luffy.data.sources.local_files import NumberedRow, columns_to_read, prompts_of, sha256_of
from luffy.data.sources.trace_source import Row
from luffy.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

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
        self._columns = self._present_columns()

    def inputs(self) -> dict[str, str]:
        """The cached files of the split."""
        files = [Path(str(file["filename"])) for file in self._dataset.cache_files]
        name = f"{self._source.path}@{self._source.revision}"
        digests = "".join(sha256_of(file) for file in files)
        return {name: digests if len(files) == 1 else hashlib.sha256(digests.encode()).hexdigest()}

    def rows(self) -> Iterator[Row]:
        """Read the rows one by one."""
        yield from prompts_of(self._numbered(), self._source, f"data.{self._purpose}: {self._source.path}")

    def _numbered(self) -> Iterator[NumberedRow]:
        name = f"{self._source.path} ({self._source.split})"
        columns = self._dataset.select_columns(self._columns)
        number = 0
        for table in columns.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
            for row in itertools.chain.from_iterable(map(decoded, table.to_batches())):
                number += 1
                yield name, number, row

    def _present_columns(self) -> list[str]:
        found = self._dataset.column_names
        wanted, required = columns_to_read(self._source)
        missing = [name for name in required if name not in found]
        if missing:
            raise DataError(
                f"data.{self._purpose}: {self._source.path}: column {', '.join(missing)} missing; "
                f"found {', '.join(found)}; map them with fields"
            )
        return present_columns(wanted, found)


def _load(source: HubSource, purpose: str) -> "Dataset":
    try:
        import datasets  # optional, and slow to import
    except ImportError:
        raise DataError(f"data.{purpose}: kind: hub needs the package datasets: pip install 'luffy-rl[hub]'") from None
    datasets.disable_progress_bars()
    local = Path(source.path).is_dir()
    try:
        return datasets.load_dataset(
            source.path, source.name, split=source.split, revision=None if local else source.revision
        )
    except Exception as error:  # noqa: BLE001 - the hub's client lets through the errors of several HTTP libraries
        raise DataError(f"data.{purpose}: {_failure(source, error)}") from None


def _failure(source: HubSource, error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    what = f"{source.path} (split {source.split}, revision {source.revision}) cannot be loaded: {text[:200]}"
    hint = (
        "without a network, give a local copy (kind: file; with a recipe: file: PATH), or fetch it once while online "
        "and set HF_HUB_OFFLINE=1"
    )
    return f"{what}; {hint}"

"""The interface of a source of prompts."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel

from luffy.types import Prompt


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A malformed row, with its place and the reason."""

    file: str
    row: int
    """Row of a parquet or CSV file or line of a JSONL file, counted from 1."""
    field: str
    reason: str


Row = Prompt | QuarantinedRow


class TraceSource(Protocol):
    """An iterator over prompts with their demonstrations; a source may be larger than memory."""

    @property
    def kind(self) -> str:
        """Its `kind` in the configuration."""
        ...

    @property
    def is_light(self) -> bool:
        """Whether passing its rows to worker processes costs more than it saves (short generated texts)."""
        ...

    def inputs(self) -> dict[str, str]:
        """Return each input by name with the sha256 of its bytes (or of a generator's settings)."""
        ...

    def rows(self) -> Iterator[Row]:
        """Yield all rows; every call yields the same ones in the same order.

        DataError if the source cannot be read or holds no usable row.
        """
        ...


def settings_digest(source: BaseModel, purpose: str, seed: int) -> str:
    """Return the sha256 of all that a generator's prompts depend on."""
    settings = json.dumps(source.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(f"{seed}:{purpose}:{settings}".encode()).hexdigest()

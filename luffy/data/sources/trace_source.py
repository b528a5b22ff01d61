"""The interface of a source of prompts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

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


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """All rows of a source that fits into memory."""

    kind: str
    prompts: list[Prompt]
    sha256: str
    """Hash of the inputs."""
    quarantined: list[QuarantinedRow] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.prompts) + len(self.quarantined)

"""The interface of every source of prompts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from luffy.types import Prompt


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A malformed row, with what a person needs to fix it."""

    file: str
    row: int
    """Row of a parquet or CSV file or line of a JSONL file, counted from 1."""
    field: str
    reason: str


Row = Prompt | QuarantinedRow


class TraceSource(Protocol):
    """Prompts with their demonstrations, one after another: a source may be larger than memory."""

    @property
    def kind(self) -> str:
        """The kind of its configuration."""
        ...

    @property
    def is_light(self) -> bool:
        """Whether handing its rows to other processes costs more than they save (short generated texts)."""
        ...

    def inputs(self) -> dict[str, str]:
        """Return what is read, each with the sha256 of its bytes (or of a generator's settings)."""
        ...

    def rows(self) -> Iterator[Row]:
        """Yield every row from the first on, the same ones in the same order each time it is called.

        DataError where the source cannot be read or holds no usable row.
        """
        ...


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """All rows of a source that fits into memory: `len(prompts) + len(quarantined)` of them."""

    kind: str
    prompts: list[Prompt]
    sha256: str
    """Hash of the inputs."""
    quarantined: list[QuarantinedRow] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.prompts) + len(self.quarantined)

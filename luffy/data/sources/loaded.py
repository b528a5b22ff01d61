"""What a source hands over: prompts, and the rows that could not be used."""

from dataclasses import dataclass, field

from luffy.types import Prompt


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A row that was set aside, with what a person needs to mend it."""

    file: str
    row: int
    """Row of a parquet file or line of a JSONL file, counted from 1."""
    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """All rows of a source: `len(prompts) + len(quarantined)` of them."""

    kind: str
    prompts: list[Prompt]
    sha256: str
    """Of the file's bytes, or of the generator's settings."""
    quarantined: list[QuarantinedRow] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.prompts) + len(self.quarantined)

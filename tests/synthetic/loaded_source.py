"""All rows of a source in memory."""

from dataclasses import dataclass

from luffy.config.data import SourceConfig
from luffy.data.sources import QuarantinedRow, open_source
from luffy.types import Prompt


@dataclass(frozen=True, slots=True)
class LoadedSource:
    kind: str
    prompts: list[Prompt]
    inputs: dict[str, str]
    quarantined: list[QuarantinedRow]


def load_source(config: SourceConfig, purpose: str, seed: int) -> LoadedSource:
    source = open_source(config, purpose, seed)
    rows = list(source.rows())
    return LoadedSource(
        kind=source.kind,
        prompts=[row for row in rows if isinstance(row, Prompt)],
        inputs=source.inputs(),
        quarantined=[row for row in rows if isinstance(row, QuarantinedRow)],
    )

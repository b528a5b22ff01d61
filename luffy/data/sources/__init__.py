"""Sources of prompts.

A new source needs a configuration class with its own `kind` in `luffy.config.data`, a function
`(config, purpose, seed) -> TraceSource`, and a line in `SOURCES`. `kind: custom` works without changes to this package.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from luffy.config.data import MixtureSource, SourceConfig
from luffy.data.sources.arithmetic import ArithmeticPrompts
from luffy.data.sources.custom import custom_source
from luffy.data.sources.generated import GuessingGames, WordProblems
from luffy.data.sources.mixture import MixedPrompts
from luffy.data.sources.packages import ReasoningGymPrompts, VerifiersTasks
from luffy.data.sources.stored_rows import FilePrompts, HubPrompts
from luffy.data.sources.trace_source import LoadedSource, QuarantinedRow, Row, TraceSource
from luffy.types import Prompt

# Each function takes the configuration class of its own kind; the type of a plain dictionary cannot express that.
SOURCES: dict[str, Callable[[Any, str, int], TraceSource]] = {
    "arithmetic": ArithmeticPrompts,
    "word_problems": WordProblems,
    "guess_number": GuessingGames,
    "file": FilePrompts,
    "hub": HubPrompts,
    "reasoning_gym": ReasoningGymPrompts,
    "verifiers": VerifiersTasks,
    "custom": custom_source,
}

__all__ = ["SOURCES", "LoadedSource", "QuarantinedRow", "Row", "TraceSource", "load_source", "open_source"]


def open_source(config: SourceConfig | MixtureSource, purpose: str, seed: int) -> TraceSource:
    """Return the source; `purpose` (`train`, `corpus`, `suites.longer`) and `seed` determine a generator's prompts."""
    if isinstance(config, MixtureSource):
        opened = {
            name: open_source(part.source, f"{purpose}.parts.{name}.source", seed)
            for name, part in config.parts.items()
        }
        return MixedPrompts(opened, {name: part.weight for name, part in config.parts.items()})
    return SOURCES[config.kind](config, purpose, seed)


def load_source(config: SourceConfig, purpose: str, seed: int) -> LoadedSource:
    """Return all rows of a source in memory."""
    source = open_source(config, purpose, seed)
    rows = list(source.rows())
    return LoadedSource(
        kind=source.kind,
        prompts=[row for row in rows if isinstance(row, Prompt)],
        sha256=digest_of_inputs(source.inputs()),
        quarantined=[row for row in rows if isinstance(row, QuarantinedRow)],
    )


def digest_of_inputs(inputs: dict[str, str]) -> str:
    """Return one sha256 for all inputs: that of a single input, else of the sorted digests; names do not count."""
    digests = sorted(inputs.values())
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

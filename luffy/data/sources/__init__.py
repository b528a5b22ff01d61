"""Where prompts come from.

To add a source: a configuration class with its own `kind` in `luffy.config.data`, a function
`(source, purpose, seed) -> LoadedSource`, and a line in `SOURCES`.
"""

from collections.abc import Callable
from typing import Any

from luffy.config.data import ArithmeticSource, FileSource
from luffy.data.sources.arithmetic import load_arithmetic
from luffy.data.sources.files import load_file
from luffy.data.sources.loaded import LoadedSource, QuarantinedRow

# Each function takes the configuration class of its own kind, which a plain dictionary cannot say.
SOURCES: dict[str, Callable[[Any, str, int], LoadedSource]] = {"arithmetic": load_arithmetic, "file": load_file}

__all__ = ["SOURCES", "LoadedSource", "QuarantinedRow", "load_source"]


def load_source(source: ArithmeticSource | FileSource, purpose: str, seed: int) -> LoadedSource:
    """Return the rows of `source`; `purpose` (`train`, `corpus`, `suites.longer`) and `seed` decide what is drawn."""
    return SOURCES[source.kind](source, purpose, seed)

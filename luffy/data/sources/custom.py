"""A user-defined source, by import path.

# my_sources.py
class Riddles:                                # a luffy.data.sources.trace_source.TraceSource
    kind, is_light = "riddles", False
    def inputs(self): return {"riddles": "sha256..."}
    def rows(self): yield Prompt(...)

def riddles(purpose, seed, options): return Riddles()

data: {train: {kind: custom, factory: my_sources:riddles}}
"""

from typing import cast

from luffy.config.data import CustomSource
from luffy.data.sources.trace_source import TraceSource
from luffy.errors import DataError
from luffy.import_paths import NotImported, imported

_NEEDED = ("kind", "is_light", "inputs", "rows")


def custom_source(source: CustomSource, purpose: str, seed: int) -> TraceSource:
    """Return the factory's source; DataError if it cannot be imported or does not return a `TraceSource`."""
    where, path = f"data.{purpose}.factory", source.factory
    try:
        factory = imported(path)
    except NotImported as error:
        raise DataError(f"{where}: {error}") from error.__cause__
    if not callable(factory):
        raise DataError(f"{where}: {path} is not a function")
    made = factory(purpose=purpose, seed=seed, options=dict(source.options))
    if missing := [needed for needed in _NEEDED if not hasattr(made, needed)]:
        raise DataError(
            f"{where}: {path} returned a {type(made).__name__} without {', '.join(missing)}; see TraceSource"
        )
    return cast(TraceSource, made)

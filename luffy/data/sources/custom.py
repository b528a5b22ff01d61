"""A user-defined source, by import path.

# my_sources.py
class Riddles:                                # a luffy.data.sources.trace_source.TraceSource
    kind, is_light = "riddles", False
    def inputs(self): return {"riddles": "sha256..."}
    def rows(self): yield Prompt(...)

def riddles(purpose, seed, options): return Riddles()

data: {train: {kind: custom, factory: my_sources:riddles}}
"""

import importlib

from luffy.config.data import CustomSource
from luffy.data.sources.trace_source import TraceSource
from luffy.errors import DataError

_NEEDED = ("kind", "is_light", "inputs", "rows")


def custom_source(source: CustomSource, purpose: str, seed: int) -> TraceSource:
    """Return the factory's source; DataError if it cannot be imported or does not return a `TraceSource`."""
    module, _, name = source.factory.partition(":")
    where = f"data.{purpose}.factory: {source.factory}"
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"{where}: cannot be imported ({error}); is its folder on PYTHONPATH?") from None
    made = factory(purpose=purpose, seed=seed, options=dict(source.options))
    missing = [needed for needed in _NEEDED if not hasattr(made, needed)]
    if missing:
        raise DataError(f"{where}: returned a {type(made).__name__} without {', '.join(missing)}; see TraceSource")
    return made

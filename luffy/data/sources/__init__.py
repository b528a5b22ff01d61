"""Sources of prompts, mixtures of them, and those of a user's own.

A new source needs a configuration class in `luffy.config.data`, with its own `kind`, and what its `reader` names: a
function or class `(config, purpose, seed) -> TraceSource`. `kind: custom` works without changes to this package:

    # my_sources.py
    class Riddles:                                # a luffy.data.sources.TraceSource
        kind, is_light = "riddles", False
        def inputs(self): return {"riddles": "sha256..."}
        def rows(self): yield Prompt(...)

    def riddles(purpose, seed, options): return Riddles()

    data: {train: {kind: custom, factory: my_sources:riddles}}

In a mixture, each prompt keeps its `data_source` and records the part that it came from. What the weights mean for a
step is decided where prompts are sampled (`luffy.rl.prompts`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar, cast

from luffy.config.data import CustomSource, MixtureSource, SourceConfig
from luffy.errors import DataError
from luffy.import_paths import NotImported, imported
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

    @property
    def is_light(self) -> bool:
        """Whether passing its rows to worker processes costs more than it saves (short generated texts)."""

    def inputs(self) -> dict[str, str]:
        """Return each input by name with the sha256 of its bytes (or of a generator's settings)."""

    def rows(self) -> Iterator[Row]:
        """Yield all rows; every call yields the same ones in the same order.

        DataError if the source cannot be read or holds no usable row.
        """


_Config = TypeVar("_Config", bound=SourceConfig)


class GeneratedPrompts:
    """Short prompts, which `make` yields: a function of their generator's settings, the seed and the purpose."""

    is_light = True

    def __init__(
        self, make: Callable[[_Config, str, int], Iterator[Prompt]], source: _Config, purpose: str, seed: int
    ) -> None:
        self.kind = source.kind
        self._make = partial(make, source, purpose, seed)
        self._rows: list[Prompt] = []
        settings = json.dumps(source.model_dump(mode="json"), sort_keys=True)
        self._digest = hashlib.sha256(f"{seed}:{purpose}:{settings}".encode()).hexdigest()

    def inputs(self) -> dict[str, str]:
        return {"settings": self._digest}

    def rows(self) -> Iterator[Row]:
        """Yield all rows, which stay in memory: to generate 115,200 of arithmetic takes 18 s."""
        self._rows = self._rows or list(self._make())
        return iter(self._rows)


def from_generator(
    make: Callable[[_Config, str, int], Iterator[Prompt]],
) -> Callable[[_Config, str, int], GeneratedPrompts]:
    """Decorates a generator of prompts, `(config, purpose, seed)`, as the source's reader."""
    return partial(GeneratedPrompts, make)


MIXTURE = "mixture"
"""Key of `extra_info` in the rows of a mixture."""
_PART, _WEIGHTS = "part", "weights"


class MixedPrompts:
    """The prompts of all parts, one part after the other."""

    kind = "mixture"

    def __init__(self, parts: Mapping[str, TraceSource], weights: Mapping[str, float]) -> None:
        self._parts = parts
        self._weights = dict(weights)
        self.is_light = all(part.is_light for part in parts.values())

    @property
    def unread(self) -> dict[str, int]:
        """The columns of all parts that are not read."""
        counted = Counter[str]()
        for part in self._parts.values():
            counted.update(getattr(part, "unread", {}))
        return dict(sorted(counted.items()))

    def inputs(self) -> dict[str, str]:
        """The inputs of every part, under its name."""
        inputs = [(name, file, digest) for name, part in self._parts.items() for file, digest in part.inputs().items()]
        return {f"{name}: {file}": digest for name, file, digest in inputs}

    def rows(self) -> Iterator[Row]:
        """Yield all rows, with the part and the weights of all parts in `extra_info`."""
        for name, part in self._parts.items():
            mark = {MIXTURE: {_PART: name, _WEIGHTS: self._weights}}
            for row in part.rows():
                yield replace(row, extra_info=row.extra_info | mark) if isinstance(row, Prompt) else row


@dataclass(frozen=True, slots=True)
class MixedIn:
    """Where a prompt of a mixture came from."""

    part: str
    weights: Mapping[str, float]
    """The weight of every part, by name."""


def mixed_in(extra_info: Mapping[str, object]) -> MixedIn | None:
    """The part recorded in a prompt's `extra_info`; None: its source is no mixture, whatever else has that key."""
    found = extra_info.get(MIXTURE)
    if not isinstance(found, Mapping) or found.keys() != {_PART, _WEIGHTS}:
        return None
    return MixedIn(str(found[_PART]), found[_WEIGHTS])


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
    if missing := [needed for needed in ("kind", "is_light", "inputs", "rows") if not hasattr(made, needed)]:
        raise DataError(
            f"{where}: {path} returned a {type(made).__name__} without {', '.join(missing)}; see TraceSource"
        )
    return cast(TraceSource, made)


def open_source(config: SourceConfig | MixtureSource, purpose: str, seed: int) -> TraceSource:
    """Return the source; `purpose` (`train`, `corpus`, `suites.longer`) and `seed` determine a generator's prompts."""
    if isinstance(config, MixtureSource):
        opened = {
            name: open_source(part.source, f"{purpose}.parts.{name}.source", seed)
            for name, part in config.parts.items()
        }
        return MixedPrompts(opened, {name: part.weight for name, part in config.parts.items()})
    open_kind = cast(Callable[[SourceConfig, str, int], TraceSource], imported(config.reader))
    return open_kind(config, purpose, seed)

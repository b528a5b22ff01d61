"""Several sources as one; each prompt keeps its `data_source` and records the part that it came from.

What the weights mean for a step is decided where prompts are sampled (`luffy.rl.prompts`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from luffy.data.sources.trace_source import Row, TraceSource
from luffy.types import Prompt

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

    def inputs(self) -> dict[str, str]:
        """The inputs of every part, under its name."""
        return {
            f"{name}: {file}": digest for name, part in self._parts.items() for file, digest in part.inputs().items()
        }

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

"""Grids: values to try for some keys of an experiment, and the points that they make."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from luffy.config.yaml_source import flow_yaml
from luffy.seeds import derive_seed


def _each_once(values: tuple[JsonValue, ...]) -> tuple[JsonValue, ...]:
    seen = set[str]()
    for value in values:
        if (text := json.dumps(value, sort_keys=True)) in seen:
            raise ValueError(f"{text} is listed twice; give each value once")
        seen.add(text)
    return values


GridValues = Annotated[tuple[JsonValue, ...], Field(min_length=1), AfterValidator(_each_once)]
Grid = Annotated[dict[str, GridValues], Field(min_length=1)]
"""Values to try by `key.path`; every combination of them is a point."""


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One value for each key of a grid."""

    number: int
    """Place in the grid, from 1; the values of the last key change fastest."""
    values: tuple[tuple[str, JsonValue], ...]

    @property
    def overrides(self) -> list[str]:
        """The values as `key.path=value`."""
        return [f"{key}={flow_yaml(value)}" for key, value in self.values]

    @property
    def text(self) -> str:
        """The values for display; empty without a key."""
        return ", ".join(f"{key}={value_text(value)}" for key, value in self.values)


NOTHING_TRIED = GridPoint(1, ())
"""The only point where there is no grid."""


def value_text(value: JsonValue) -> str:
    """A value as people write it: `0.0004`, `cosine`, `{kind: constant}`."""
    return f"{value:g}" if isinstance(value, float) else flow_yaml(value)


def is_number(value: JsonValue) -> bool:
    """Whether the value is a number, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def grid_points(grid: Grid | None) -> tuple[GridPoint, ...]:
    """Every combination, the values of the last key changing fastest; one empty point without a grid."""
    if grid is None:
        return (NOTHING_TRIED,)
    combinations = itertools.product(*grid.values())
    return tuple(
        GridPoint(number, tuple(zip(grid, values, strict=True))) for number, values in enumerate(combinations, start=1)
    )


def draw_points(points: Sequence[GridPoint], number: int, seed: int) -> tuple[GridPoint, ...]:
    """`number` of the points, in their order; equal grids get equal draws. Needs at least as many."""
    drawn = sorted(points, key=lambda point: derive_seed(seed, "grid", point.text))[:number]
    return tuple(sorted(drawn, key=lambda point: point.number))

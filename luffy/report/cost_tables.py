"""Costs of runs as a table."""

from collections.abc import Callable, Mapping
from dataclasses import fields

from luffy.evaluation.method_comparison.arms import Costs
from luffy.report import wording
from luffy.report.tables import Table, TableCell

_NONE = "–"


def costs_by_name(first: str, costs: Mapping[str, Costs | None]) -> Table:
    """One row per name, under the heading `first`; costs that no name has get no column."""
    formats: Mapping[str, tuple[str, Callable[[float], str]]] = {
        "optimizer_steps": ("optimizer steps", _whole),
        "rollouts": ("rollouts", _whole),
        "generated_tokens": ("generated tokens", _whole),
        "trained_tokens": ("trained tokens", _whole),
        "seconds": ("training time", wording.duration),
        "peak_memory_gib": ("peak memory, GiB", lambda value: f"{value:.2f}"),
        "gpu_hours": ("GPU-hours", lambda value: f"{value:.2f}"),
    }
    values = {name: each.values() if each is not None else {} for name, each in costs.items()}
    known = [each.name for each in fields(Costs) if any(of.get(each.name) is not None for of in values.values())]
    rows = tuple(
        (TableCell(name), *(_cell(of.get(cost), formats[cost][1]) for cost in known)) for name, of in values.items()
    )
    return Table((first, *(formats[cost][0] for cost in known)), rows)


def _cell(value: float | None, words: Callable[[float], str]) -> TableCell:
    return TableCell(_NONE if value is None else words(value))


def _whole(value: float) -> str:
    return f"{value:,.0f}"

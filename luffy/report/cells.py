"""What tables show: numbers as people read them, an accuracy, a difference, and the table itself.

Pages show a table as HTML or Markdown, terminals as text.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:  # every command imports this module
    from luffy.evaluation.across_runs.run_results import Costs
    from luffy.statistics.accuracy import Estimate, PairedDifference
    from luffy.tracking.step_times import StepTimes

Item = TypeVar("Item")
NBSP = "\u00a0"
NONE = "–"
_UNITS = ("KiB", "MiB", "GiB", "TiB")
Tone = Literal["", "better", "worse"]
"""How a cell is coloured."""


@dataclass(frozen=True, slots=True)
class TableCell:
    """A number or name, with details in small print."""

    text: str
    details: tuple[str, ...] = ()
    tone: Tone = ""

    @property
    def plain(self) -> str:
        """Text and details on one line, without markup."""
        return self.lines.replace("\n", " ")

    @property
    def lines(self) -> str:
        """The same, each on a line of its own."""
        return "\n".join((self.text, *self.details)).replace(NBSP, " ")


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column names the rows."""

    header: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    title: str = ""
    note: str = ""
    style: str = "compact"
    """Classes of `templates/page.css`: `compact`, or `numbers` for few large ones."""

    @property
    def texts(self) -> list[list[str]]:
        """The rows without markup, for a terminal."""
        return [[cell.plain for cell in row] for row in self.rows]


def table(
    header: Sequence[str], rows: Iterable[Iterable[object]], title: str = "", note: str = "", style: str = "compact"
) -> Table:
    """A table of cells, and of texts and numbers as they are."""
    cells = tuple(tuple(each if isinstance(each, TableCell) else TableCell(str(each)) for each in row) for row in rows)
    return Table(tuple(header), cells, title, note, style)


def table_of(
    items: Iterable[Item], columns: Mapping[str, Callable[[Item], object]], title: str = "", note: str = ""
) -> Table:
    """A row for each item; `columns` has the heading of each column and what it shows of an item."""
    return table(tuple(columns), ([value(item) for value in columns.values()] for item in items), title, note)


def accuracy(found: "Estimate | None", by_seed: Iterable[float] = ()) -> TableCell:
    """An accuracy in percent, with its interval and that of each seed where there are several; a dash for None."""
    if found is None:
        return TableCell(NONE)
    seeds, bounds = [percent(each) for each in by_seed], f"[{percent(found.low)},{NBSP}{percent(found.high)}]"
    return TableCell(percent(found.value), (bounds, f"({', '.join(seeds)})") if len(seeds) > 1 else (bounds,))


def difference(found: "Estimate", p: float | None = None, *, notes: Sequence[str] = (), tone: Tone = "") -> TableCell:
    """A difference in percentage points, with its interval and the p-value `p`."""
    tested = () if p is None else (p_value(p),)
    bounds = f"[{signed(found.low)},{NBSP}{signed(found.high)}]"
    return TableCell(signed(found.value), (bounds, *tested, *notes), tone)


def tone(found: "Estimate", is_significant: bool) -> Tone:
    return "" if not is_significant else "better" if found.value > 0 else "worse"


def p_value(p: float) -> str:
    """A p-value, which is never 0."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def counts(found: "PairedDifference") -> str:
    """On how many problems the second is better, worse and the same."""
    return f"{found.wins} better, {found.losses} worse, {found.ties} same"


def percent(share: float | None) -> str:
    """`0.125` as `12.5`, None as a dash; the percent sign is in the heading."""
    return NONE if share is None else f"{100 * share:.1f}"


def signed(share: float) -> str:
    """Percentage points with their sign; a true minus, so that it lines up."""
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def duration(seconds: float) -> str:
    """`8s`, `3m20s`, `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def size_words(num_bytes: float) -> str:
    """`17 B`, `3.4 MiB`."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    power = min(int(math.log(num_bytes, 1024)), len(_UNITS))
    return f"{num_bytes / 1024**power:.1f} {_UNITS[power - 1]}"


def moment(iso: str) -> datetime:
    """A manifest's time."""
    return datetime.fromisoformat(iso).astimezone(UTC)


def timestamp(iso: str) -> str:
    return f"{moment(iso):%Y-%m-%d %H:%M} UTC"


def count(number: int, noun: str) -> str:
    """`1 problem`, `2 problems`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def step_times_table(times: "Mapping[str, StepTimes]") -> Table:
    """Where a step's time went in each of some stages, by name; parts that take none anywhere get no row."""
    rows: list[tuple[object, ...]] = []
    for name in next(iter(times.values())).parts:
        spent = [(each.parts[name], percent(each.parts[name] / each.step_s)) for each in times.values()]
        shown = [
            TableCell(f"{s:.2f} s", (f"{share}{NBSP}%",)) if s >= _SHOWN_S else TableCell(NONE) for s, share in spent
        ]
        rows += [(name, *shown)] if any(cell.details for cell in shown) else []
    rows.append(("a step", *(f"{each.step_s:.2f} s" for each in times.values())))
    rows.append(("tokens a second", *(f"{each.tokens_per_s:,.0f}" for each in times.values())))
    if any(each.mfu is not None for each in times.values()):
        rows.append(("MFU % of scoring and update", *(percent(each.mfu) for each in times.values())))
    rows.append(("start, once", *(f"{each.start_s:.1f} s" for each in times.values())))
    return table(("part of a step", *times), rows)


_SHOWN_S = 0.005
"""Less is 0.00 s."""


def tally(counts: "Mapping[str, int]", longest: "Mapping[str, int] | None" = None) -> str:
    """`wrong 2, too long 1 (up to 1,200 tokens)`; `longest`: of what is too long, the tokens of the longest."""
    up_to = {name: f" (up to {tokens:,} tokens)" for name, tokens in (longest or {}).items()}
    parts = (f"{name.replace('_', ' ')} {number:,}{up_to.get(name, '')}" for name, number in counts.items())
    return ", ".join(parts) or NONE


def sources_table(sources: "Mapping[str, Mapping[str, Any]]") -> Table:
    """What the data card counts of each source by name; token counts are the median and the maximum of what passed."""

    def quantiles(tokens: Mapping[str, int]) -> str:
        return f"{tokens['p50']} (max {tokens['max']})" if tokens else NONE

    def rejected(source: Mapping[str, Any], what: str) -> str:
        folded = {"folded into another": source["folded"]} if what == "rejected" and source.get("folded") else {}
        return tally({**source[what], **folded}, source.get("longest_rejected"))

    return table_of(
        sources.items(),
        {
            "source": lambda item: item[0],
            "kind": lambda item: item[1]["kind"],
            "rows in": lambda item: f"{item[1]['rows_in']:,}",
            "rows out": lambda item: f"{item[1]['rows_out']:,}",
            "traces": lambda item: f"{item[1]['traces_out']:,}",
            "rejected rows": lambda item: rejected(item[1], "rejected"),
            "rejected traces": lambda item: rejected(item[1], "rejected_traces"),
            "malformed, by field": lambda item: tally(item[1]["malformed"]),
            "prompt tokens": lambda item: quantiles(item[1]["prompt_tokens"]),
            "trace tokens": lambda item: quantiles(item[1]["trace_tokens"]),
        },
    )


def costs_by_name(first: str, costs: "Mapping[str, Costs | None]") -> Table:
    """One row per name, under the heading `first`; costs that no name has get no column."""
    whole, exact = "{:,.0f}".format, "{:.2f}".format
    formats: Mapping[str, tuple[str, Callable[[float], str]]] = {
        "optimizer_steps": ("optimizer steps", whole),
        "rollouts": ("rollouts", whole),
        "generated_tokens": ("generated tokens", whole),
        "trained_tokens": ("trained tokens", whole),
        "seconds": ("training time", duration),
        "peak_memory_gib": ("peak memory, GiB", exact),
        "gpu_hours": ("GPU-hours", exact),
    }
    values = {name: asdict(each) if each is not None else {} for name, each in costs.items()}
    known = [cost for cost in formats if any(of.get(cost) is not None for of in values.values())]
    rows = (
        (name, *(NONE if (value := of.get(cost)) is None else formats[cost][1](value) for cost in known))
        for name, of in values.items()
    )
    return table((first, *(formats[cost][0] for cost in known)), rows)

"""Numbers as people read them."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from luffy.evaluation.results import ResultRow
    from luffy.statistics.accuracy import PairedDifference
    from luffy.statistics.paired import BenchmarkComparison

NBSP = "\u00a0"


def percent(share: float) -> str:
    """`0.125` as `12.5`; the percent sign is in the heading."""
    return f"{100 * share:.1f}"


def interval(low: float, high: float) -> str:
    """Bounds in percent."""
    return f"[{percent(low)},{NBSP}{percent(high)}]"


def accuracy(row: "ResultRow") -> str:
    """An accuracy with its interval, in a sentence."""
    return f"{percent(row.accuracy)}{NBSP}% {interval(*row.interval)}"


def points(difference: "PairedDifference") -> str:
    """A difference with its interval, in percentage points."""
    estimate = difference.difference
    return f"{signed(estimate.value)} {signed_interval(difference)}"


def signed_interval(difference: "PairedDifference") -> str:
    """Bounds in percentage points."""
    return f"[{signed(difference.difference.low)},{NBSP}{signed(difference.difference.high)}]"


def adjusted_p(row: "BenchmarkComparison") -> str:
    """The p-value after Holm's correction, which is never 0."""
    return "p < 0.001" if row.adjusted_p < 0.001 else f"p = {row.adjusted_p:.3f}"


def signed(share: float) -> str:
    """Percentage points with their sign; a true minus, so that it lines up."""
    text = f"{100 * share:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


def duration(seconds: float) -> str:
    """`7 min 05 s`, `2 h 10 min`, or seconds."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def size(num_bytes: int) -> str:
    """In the largest unit that leaves a number above 1."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def moment(iso: str) -> datetime:
    """A manifest's time."""
    return datetime.fromisoformat(iso).astimezone(UTC)


def timestamp(iso: str) -> str:
    return f"{moment(iso):%Y-%m-%d %H:%M} UTC"


def count(number: int, noun: str) -> str:
    """`1 problem`, `2 problems`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"

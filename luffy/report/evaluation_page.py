"""`summary.html` of an evaluation: the tables of `summary.md` with plots, as one self-contained file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from luffy.evaluation.results import EvaluationResults, ResultRow, advice_on, checkpoint_name
from luffy.files import write_atomic
from luffy.report.breakdown import BreakdownSection, Scored, breakdown_sections
from luffy.report.evaluation_tables import (
    SUMMARY_FILE,
    agreements,
    by_decoding,
    choices,
    forms,
    health,
    mean_accuracy,
    protocols,
    render_summary,
    scores,
)
from luffy.report.plotter import Dot, dot_plot
from luffy.report.rendering import render
from luffy.report.tables import Table

PAGE_FILE = "summary.html"
_COLOR = "c1"
_HEALTH = "Responses, in percent but for the counts and the tokens:"


@dataclass(frozen=True, slots=True)
class DecodingSection:
    """One decoding."""

    title: str
    dots: str
    scores: Table
    mean: str
    advice: str | None
    """On suites without readable answers."""
    others: tuple[tuple[str, Table], ...]
    """Further tables, each with its introduction."""
    breakdowns: tuple[BreakdownSection, ...]


def write_summaries(folder: Path, results: EvaluationResults) -> None:
    """Put `summary.md` and `summary.html` into the folder of an evaluation."""
    write_atomic(folder / SUMMARY_FILE, render_summary(results))
    write_atomic(folder / PAGE_FILE, render_page(results))


def render_page(results: EvaluationResults) -> str:
    """Return the page; the same results give the same bytes."""
    return render(
        "evaluation.html.jinja",
        checkpoint=checkpoint_name(results.checkpoint),
        confidence=f"{100 * results.confidence:g}",
        decodings=[_section(name, rows) for name, rows in by_decoding(results.rows).items()],
    )


def _section(name: str, rows: Sequence[ResultRow]) -> DecodingSection:
    others = (health(rows), forms(rows), agreements(rows), choices(rows), protocols(rows))
    return DecodingSection(
        title=name,
        dots=dot_plot(f"accuracy-{name}", [(row.suite, [Dot(_COLOR, row.accuracy, *row.interval)]) for row in rows]),
        scores=scores(rows),
        mean=mean_accuracy(rows),
        advice=advice_on(rows),
        others=tuple((table.note or _HEALTH, table) for table in others if table.rows),
        breakdowns=tuple(
            section for row in rows for section in breakdown_sections(name, [Scored("accuracy", _COLOR, row)])
        ),
    )

"""What a sweep over checkpoints shows: accuracy over the steps, as curves with intervals and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luffy.evaluation.results import EvaluationResults, ResultRow
from luffy.report import wording
from luffy.report.plotter import Dot, band_plot
from luffy.report.rendering import render
from luffy.report.tables import Table, TableCell
from luffy.statistics.paired import BenchmarkComparisons, PairedAccuracies, compare

_COLOR = "c1"
Counts = Mapping[tuple[str, str], Mapping[str, int]]
"""Correct responses by problem, of each suite and decoding."""


@dataclass(frozen=True, slots=True)
class SweptStep:
    """One evaluated checkpoint."""

    step: int
    results: EvaluationResults
    correct: Counts

    def row(self, suite: str, decoding: str) -> ResultRow:
        """The result on a suite under a decoding; every step has the same."""
        return next(row for row in self.results.rows if (row.suite, row.decoding) == (suite, decoding))


@dataclass(frozen=True, slots=True)
class SweepSection:
    """One decoding."""

    title: str
    curves: tuple[tuple[str, str], ...]
    """Suite and drawing."""
    table: Table
    changes: Table | None


def render_curve(steps: Sequence[SweptStep]) -> str:
    """The page on `steps`, in ascending order, as HTML that needs no other file."""
    decodings = dict.fromkeys(row.decoding for row in steps[0].results.rows)
    return render(
        "sweep.html.jinja",
        steps=[swept.step for swept in steps],
        confidence=f"{100 * steps[0].results.confidence:g} %",
        sections=[_section(decoding, steps) for decoding in decodings],
    )


def _section(decoding: str, steps: Sequence[SweptStep]) -> SweepSection:
    suites = [row.suite for row in steps[0].results.rows if row.decoding == decoding]
    rows = (
        (TableCell(str(swept.step)), *(_accuracy(swept.row(suite, decoding)) for suite in suites)) for swept in steps
    )
    return SweepSection(
        title=decoding,
        curves=tuple((suite, _curve(suite, decoding, steps)) for suite in suites),
        table=Table(("step", *(_heading(steps[0].row(suite, decoding)) for suite in suites)), tuple(rows)),
        changes=_changes(suites, decoding, steps) if len(steps) > 1 else None,
    )


def _curve(suite: str, decoding: str, steps: Sequence[SweptStep]) -> str:
    rows = [swept.row(suite, decoding) for swept in steps]
    dots = [Dot(_COLOR, row.accuracy, *row.interval) for row in rows]
    return band_plot(f"sweep-{decoding}-{suite}", [swept.step for swept in steps], dots)


def _heading(row: ResultRow) -> str:
    return f"{row.suite}, {row.num_problems:,} × {row.num_samples}"


def _accuracy(row: ResultRow) -> TableCell:
    return TableCell(wording.percent(row.accuracy), (wording.interval(*row.interval),))


def _changes(suites: Sequence[str], decoding: str, steps: Sequence[SweptStep]) -> Table:
    """The first step against the last on the same problems."""
    first, last = steps[0], steps[-1]
    comparison = _compare(first, last, suites, decoding)
    header = ("suite", f"step {first.step} → {last.step}", "verdict")
    return Table(header, tuple(_change(comparison, suite) for suite in suites))


def _compare(first: SweptStep, last: SweptStep, suites: Sequence[str], decoding: str) -> BenchmarkComparisons:
    pairs = {}
    for suite in suites:
        before, after = first.correct[suite, decoding], last.correct[suite, decoding]
        k = first.row(suite, decoding).num_samples
        pairs[suite] = PairedAccuracies([before[uid] / k for uid in before], [after[uid] / k for uid in before], k)
    return compare(pairs, first.results.confidence)


def _change(comparison: BenchmarkComparisons, suite: str) -> tuple[TableCell, ...]:
    row = comparison.on(suite)
    difference = row.paired
    counts = f"{difference.wins} better, {difference.losses} worse, {difference.ties} same"
    rises = difference.difference.value > 0
    return (
        TableCell(suite),
        TableCell(wording.signed(difference.difference.value), (wording.signed_interval(difference), counts)),
        TableCell(
            "clear" if row.is_significant else "not distinguishable from no change",
            (wording.adjusted_p(row),),
            "" if not row.is_significant else "better" if rises else "worse",
        ),
    )

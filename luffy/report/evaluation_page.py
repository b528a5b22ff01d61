"""What an evaluation shows: `summary.md` and `summary.html`, the page of a sweep over checkpoints, and the leaderboard.

The tables of a decoding are also those of a chain's report (`luffy.report.chain_page`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from luffy.evaluation.results import CheckpointScores, EvaluationResults, ResultRow, advice_on, checkpoint_name
from luffy.files import write_atomic
from luffy.report.cells import (
    NONE,
    Table,
    TableCell,
    accuracy,
    count,
    counts,
    difference,
    p_value,
    percent,
    table,
    table_of,
    tone,
)
from luffy.report.figures import Bands, Chart, chart, dots, estimates
from luffy.report.page import Figure, Page, Section, html, markdown
from luffy.statistics.accuracy import Estimate

if TYPE_CHECKING:  # stages that evaluate know of no other runs
    from luffy.evaluation.across_runs.all_results import Column, Leaderboard, ProtocolTable

SUMMARY_FILE = "summary.md"
PAGE_FILE = "summary.html"
MARK = "★"
_COLOR = "c1"
_COLORS = ("c1", "c2", "c3", "c4", "c5", "c7", "c6")


@dataclass(frozen=True, slots=True)
class Scored:
    """A model's row, and how the page calls and colours the model."""

    name: str
    color: str
    row: ResultRow


def write_summaries(folder: Path, results: EvaluationResults) -> None:
    """Put `summary.md` and `summary.html` into the folder of an evaluation."""
    page = evaluation_page(results)
    write_atomic(folder / SUMMARY_FILE, markdown(page))
    write_atomic(folder / PAGE_FILE, html(page))


def evaluation_page(results: EvaluationResults) -> Page:
    """All that the results say, a section for each decoding."""
    sections = []
    for name, rows in by_decoding(results.rows).items():
        mean = sum(row.accuracy for row in rows) / len(rows)
        of_all = f"Mean of these {len(rows)} accuracies, each suite counted once: {percent(mean)}."
        drawn = accuracy_figure([(row.suite, [(_COLOR, row.estimate, ())]) for row in rows])
        scored = [Scored("accuracy", _COLOR, row) for row in rows]
        protocols = table_of(
            [(row.suite, row.protocol) for row in rows if row.protocol is not None],
            {
                "suite": lambda found: found[0],
                "template": lambda found: found[1].template,
                "temperature": lambda found: f"{found[1].temperature:g}" if found[1].temperature else "0 (greedy)",
                "top-p": lambda found: f"{found[1].top_p:g}",
                "response tokens": lambda found: found[1].max_response_tokens,
                "stops at": lambda found: ", ".join(map(repr, found[1].stop)) or NONE,
                "engine": lambda found: found[1].engine,
            },
            "How the responses were sampled",
        )
        sections.append(
            Section(
                title=name,
                notes=tuple(filter(None, (of_all if len(rows) > 1 else "", advice_on(rows)))),
                figures=(drawn,),
                tables=tuple(table for table in (scores(scored), *measures(scored), protocols) if table.rows),
                sections=tuple(section for one in scored for section in breakdowns([one])),
            )
        )
    return Page(
        f"Evaluation of {checkpoint_name(results.checkpoint)}",
        "Accuracies are means over all responses (avg@k), in percent; the intervals, at "
        f"{100 * results.confidence:g} %, are over problems: what another set of problems of this kind would give.",
        tuple(sections),
    )


def checkpoints_page(steps: Mapping[int, CheckpointScores]) -> Page:
    """Accuracy over the steps of RL, in ascending order, as curves with intervals and as a table."""
    (first_step, first), (last_step, last) = min(steps.items()), max(steps.items())
    confidence = first.results.confidence
    note = (
        f"Each point is a checkpoint of the run; its band is the {100 * confidence:g} % interval over "
        "problems: what another set of problems of the same kind would give. Neighbouring points share their problems "
        "and random seeds, so a difference may be clear although the bands overlap: the first and the last are "
        "compared on the same problems below."
    )
    sections = [Section(notes=(note,))]
    for decoding, rows in by_decoding(first.results.rows).items():
        estimates_of = {
            row.suite: [at.estimate for each in steps.values() if (at := each.row((row.suite, decoding)))]
            for row in rows
        }
        figures, tables = [], []
        for suite, found in estimates_of.items():
            line = estimates("accuracy", _COLOR, list(steps), found)
            drawn = chart(Chart(suite, [line], percent=True))
            figures.append(Figure(suite, "", drawn))
        header = (f"{row.suite}, {row.num_problems:,} × {row.num_samples}" for row in rows)
        cells = ((step, *(accuracy(found[i]) for found in estimates_of.values())) for i, step in enumerate(steps))
        title = "Accuracy in percent: suite, problems × responses to each"
        tables.append(table(("step", *header), cells, title, style="numbers"))
        if len(steps) > 1:  # the first against the last, on the same problems
            compared, changes = last.against(first, estimates_of, decoding), []
            for suite in estimates_of:
                of_suite = compared.on(suite)
                change = of_suite.paired.difference
                verdict = "clear" if of_suite.is_significant else "not distinguishable from no change"
                shown = TableCell(verdict, (p_value(of_suite.adjusted_p),), tone(change, of_suite.is_significant))
                changes.append((suite, difference(change, notes=(counts(of_suite.paired),)), shown))
            columns = ("suite", f"step {first_step} → {last_step}", "verdict")
            what = "Change in percentage points, paired over problems; p-values after Holm's correction over the suites"
            tables.append(table(columns, changes, what, style="numbers"))
        sections.append(Section(title=decoding, figures=tuple(figures), tables=tuple(tables)))
    return Page("Accuracy over RL steps", f"checkpoints of steps {', '.join(map(str, steps))}", tuple(sections))


def accuracy_figure(
    bands: Bands[tuple[str, Estimate, Sequence[float]]], legend: tuple[tuple[str, str], ...] = ()
) -> Figure:
    """Accuracies with their intervals, each (colour, estimate, value of each seed), in titled bands."""
    has_seeds = any(len(by_seed) > 1 for _, found in bands for *_, by_seed in found)
    note = "Dot: accuracy; line: its interval" + ("; small dots: each seed." if has_seeds else ".")
    return Figure("Accuracy", note, dots(bands), legend, is_wide=True)


def accuracies(
    kind: str, models: Sequence[tuple[str, str]], found: Mapping[str, Mapping[str, Estimate]]
) -> tuple[Figure, Table]:
    """Accuracies of several models, each (colour, name), as a figure and a table, a row for each `kind` in `found`."""
    rows, bands = [], []
    for label, of_models in found.items():
        problems = count(max(each.num_problems for each in of_models.values()), "problem")
        rows.append((TableCell(label, (problems,)), *(accuracy(of_models.get(model)) for _, model in models)))
        bands.append((label, [(color, of_models[model], ()) for color, model in models if model in of_models]))
    shown = table((kind, *(model for _, model in models)), rows, style="numbers")
    return accuracy_figure(bands, tuple(models)), shown


def by_decoding(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """The rows of each decoding, in their order."""
    found: dict[str, list[ResultRow]] = {}
    for row in rows:
        found.setdefault(row.decoding, []).append(row)
    return found


def scores(scored: Sequence[Scored], *, named: bool = False) -> Table:
    """Accuracies with their intervals, pass@k, maj@k; `named`: with the names of the models."""
    return table_of(
        scored,
        {
            "suite": lambda one: one.row.suite,
            **({"checkpoint": lambda one: one.name} if named else {}),
            "problems": lambda one: f"{one.row.num_problems:,}",
            "k": lambda one: one.row.num_samples,
            "accuracy": lambda one: accuracy(one.row.estimate),
            "method of the interval": lambda one: one.row.method,
            "pass@k": lambda one: shares_at_k(one.row.pass_at_k),
            "maj@k": lambda one: shares_at_k(one.row.maj_at_k),
        },
    )


def measures(scored: Sequence[Scored], *, named: bool = False) -> tuple[Table, ...]:
    """Tables of other measures than accuracy; without rows where there is none.

    Shares of truncated, unanswered, unparsable and failed responses with mean lengths; and what puts scores of multiple
    choice into perspective.
    """
    health = table_of(
        scored,
        {
            "suite": lambda one: one.row.suite,
            **({"checkpoint": lambda one: one.name} if named else {}),
            "truncated": lambda one: percent(one.row.truncated_share) if one.row.mean_tokens else NONE,
            "no answer": lambda one: percent(one.row.no_answer_share),
            "unparsable": lambda one: percent(
                one.row.outcomes.get("unparsable", 0) / (one.row.num_problems * one.row.num_samples)
            ),
            "timed out, crashed": lambda one: one.row.outcomes.get("timed_out", 0) + one.row.outcomes.get("crashed", 0),
            "mean tokens": lambda one: f"{one.row.mean_tokens:.0f}" if one.row.mean_tokens else NONE,
            "graded by": lambda one: ", ".join(one.row.graders) or NONE,
        },
        "Responses: shares in percent, and how long they are",
    )
    choices = table_of(
        [(one, one.row.choices) for one in scored if one.row.choices is not None],
        {
            "suite": lambda found: found[0].row.suite,
            **({"checkpoint": lambda found: found[0].name} if named else {}),
            "accuracy": lambda found: percent(found[0].row.accuracy),
            "names no option": lambda found: percent(found[1].unparsed_share),
            "adjusted for guessing": lambda found: percent(found[1].guess_adjusted),
            "guessing alone": lambda found: percent(found[1].chance),
        },
        "Multiple choice",
        "The score adjusted for guessing counts a response that names no option as a guess, and is not an accuracy.",
    )
    return health, choices


def shares_at_k(shares: Mapping[str, float]) -> str:
    """`1: 50.0, 2: 75.0`, in percent."""
    return ", ".join(f"{k}: {percent(value)}" for k, value in shares.items()) or NONE


def breakdowns(scored: Sequence[Scored]) -> list[Section]:
    """Accuracy on one suite by subject and by level, those that the data name, of one model or of several."""
    sections = []
    for kind in ("subject", "level"):
        found: dict[str, dict[str, Estimate]] = {}
        for one in scored:
            for label, part in (one.row.by_subject if kind == "subject" else one.row.by_level).items():
                found.setdefault(label, {})[one.name] = part.estimate
        if found:
            suite, models = scored[0].row.suite, [(one.color, one.name) for one in scored]
            models = [each for each in models if any(each[1] in of_models for of_models in found.values())]
            drawn, shown = accuracies(kind, models, found)
            sections.append(Section(title=f"{suite} by {kind}", in_columns=True, figures=(drawn,), tables=(shown,)))
    return sections


def leaderboard_page(board: "Leaderboard", workspace: str) -> Page:
    """A section for each protocol, and what was left out."""
    note = (
        "Accuracy in percent, mean over all responses, with its interval over problems: what another set of problems "
        "of the same kind would give. Under a suite's name: its problems × responses to each. "
        f"{MARK} marks the best row of a suite where it is clearly better than the next one (a test of their "
        "difference on the same problems, corrected after Holm for the number of suites); where no row is marked, the "
        "first ones cannot be told apart. Rows are compared within a table only, since a table is one protocol. The "
        "best mean stands first; means are not tested."
    )
    sections = [Section(notes=(note,)), *map(_protocol_section, board.tables)]
    if board.left_out:
        left_out = (f"{directory.name}: {reason}" for directory, reason in board.left_out.items())
        sections.append(Section(title="Left out", notes=tuple(left_out)))
    return Page("Leaderboard", f"workspace {workspace}", tuple(sections), workspace)


def leaderboard_table(ranking: "ProtocolTable") -> Table:
    """One row per model: its name, then its accuracy on each suite, marked where it is clearly the best."""
    means = [ranking.mean(each) for each in ranking.rows]
    has_means, headings = any(means), [_heading(ranking, column) for column in ranking.columns]
    header = ("checkpoint", "method", "run", *headings, *(["mean"] if has_means else []))
    rows = []
    for each, mean in zip(ranking.rows, means, strict=True):
        model = each.model
        more = (f"and {len(model.runs) - 1} more",) if len(model.runs) > 1 else ()
        row = [TableCell(model.checkpoint), TableCell(model.method or NONE), TableCell(model.run, more)]
        for column in ranking.columns:
            found, lead = each.cells.get(column), ranking.leads.get(column)
            cell = accuracy(None if found is None else found.row.estimate)
            is_best = lead is not None and lead.best is each and lead.comparison.is_significant
            row.append(TableCell(f"{cell.text} {MARK}", cell.details, "better") if is_best else cell)
        rows.append((*row, *([accuracy(mean)] if has_means else [])))
    return Table(header, tuple(rows), style="numbers board")


def _protocol_section(ranking: "ProtocolTable") -> Section:
    methods = dict.fromkeys(found.row.method for each in ranking.rows for found in each.cells.values())
    notes = (
        f"Here {ranking.note}." if ranking.note else "",
        f"Intervals: {'; '.join(filter(None, methods))}." if any(methods) else "",
    )
    figures, colors = list[Figure](), list(zip(_COLORS, ranking.rows, strict=False))
    if len(ranking.rows) <= len(_COLORS):
        bands = [
            (column.suite, [(c, each.cells[column].row.estimate, ()) for c, each in colors if column in each.cells])
            for column in ranking.columns
        ]
        figures.append(accuracy_figure(bands, tuple((color, each.model.text) for color, each in colors)))
    leads = []
    for column, lead in ranking.leads.items():
        found, p = lead.comparison.paired, p_value(lead.comparison.adjusted_p)
        clear, even = TableCell(f"{MARK} clearly better", (p,), "better"), TableCell("not distinguishable", (p,))
        change = difference(found.difference, notes=(counts(found),))
        names = _heading(ranking, column).partition("\n")[0], lead.best.model.text, lead.next.model.text
        leads.append((*names, change, clear if lead.comparison.is_significant else even))
    note = (
        "Percentage points with their interval, and the number of problems on which the best was right more or less "
        "often. p-values after Holm's correction over the table's suites."
    )
    compared = table(("suite", "best", "next", "difference", "verdict"), leads, note=note)
    folded = Section(title="The best against the next on each suite", is_folded=True, tables=(compared,))
    return Section(
        title=ranking.title,
        aside=f"{100 * ranking.confidence:g} % intervals",
        notes=tuple(filter(None, notes)),
        tables=(leaderboard_table(ranking),),
        sections=(Section(figures=tuple(figures)), *([folded] if leads else [])),
    )


def _heading(ranking: "ProtocolTable", column: "Column") -> str:
    """Heading of a column: the suite, its distinguishing settings, its problems and the responses to each."""
    shown = column.suite, column.num_problems, column.num_samples
    alike = [each for each in ranking.columns if (each.suite, each.num_problems, each.num_samples) == shown]
    mark = f" #{column.problems[:4]}" if len(alike) > 1 else ""
    return f"{column.suite}{mark}\n{column.num_problems:,} × {column.num_samples}"

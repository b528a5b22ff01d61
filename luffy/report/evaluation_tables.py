"""`summary.md`: `results.json` as tables for people."""

from collections.abc import Mapping, Sequence

from luffy.evaluation.results import Breakdown, EvaluationResults, ResultRow, SamplingProtocol, advice_on
from luffy.report.tables import Table, text_table

SUMMARY_FILE = "summary.md"
_NONE = "-"


def render_summary(results: EvaluationResults) -> str:
    """Return the page in Markdown; shares in percent."""
    level = f"{100 * results.confidence:g} %"
    sections = [
        f"# Evaluation of `{results.checkpoint}`\n\nAccuracies are means over all responses (avg@k), in percent; the "
        f"intervals, at {level}, are over problems: what another set of problems of this kind would give.",
        *(_of_decoding(name, rows) for name, rows in by_decoding(results.rows).items()),
        *_breakdowns(results.rows),
    ]
    return "\n\n".join(sections) + "\n"


def scores(rows: Sequence[ResultRow]) -> Table:
    """Accuracies with their intervals, pass@k, maj@k."""
    return text_table(
        ("suite", "problems", "k", "accuracy", "interval", "its method", "pass@k", "maj@k"),
        tuple((row.suite, str(row.num_problems), str(row.num_samples), *_scores(row), *_votes(row)) for row in rows),
    )


def votes(rows: Sequence[ResultRow]) -> Table:
    """pass@k and maj@k, where there are several responses per problem."""
    several = [row for row in rows if row.num_samples > 1]
    return text_table(
        ("suite", "k", "pass@k", "maj@k"), tuple((row.suite, str(row.num_samples), *_votes(row)) for row in several)
    )


def health(rows: Sequence[ResultRow]) -> Table:
    """Shares of truncated, unanswered, unparsable and failed responses, with mean lengths and graders."""
    return text_table(
        ("suite", "truncated", "no answer", "unparsable", "timed out, crashed", "mean tokens", "graded by"),
        tuple((row.suite, *_health(row)) for row in rows),
    )


def agreements(rows: Sequence[ResultRow]) -> Table:
    """Two graders on the same responses, where two have judged them."""
    found = tuple(
        (
            row.suite,
            f"{row.agreement.first}, {row.agreement.second}",
            _percent(row.agreement.share),
            str(row.agreement.only_first),
            str(row.agreement.only_second),
            _percent(row.agreement.second_accuracy),
        )
        for row in rows
        if row.agreement is not None
    )
    header = ("suite", "graders", "agree", "only the first says correct", "only the second", "accuracy by the second")
    return text_table(header, found, "Two graders on the same responses:")


def choices(rows: Sequence[ResultRow]) -> Table:
    """Figures that put multiple-choice scores into perspective."""
    found = tuple(
        (
            row.suite,
            _percent(row.accuracy),
            _percent(row.choices.unparsed_share),
            _percent(row.choices.guess_adjusted),
            _percent(row.choices.chance),
        )
        for row in rows
        if row.choices is not None
    )
    text = (
        "Multiple choice; the score adjusted for guessing counts a response that names no option as a guess, and is "
        "not an accuracy:"
    )
    header = ("suite", "accuracy", "names no option", "adjusted for guessing", "guessing alone")
    return text_table(header, found, text)


def forms(rows: Sequence[ResultRow]) -> Table:
    """How many responses have the form that was asked for, and how many answers are right with and without it."""
    found = tuple(
        (
            row.suite,
            str(row.form.right_in_form),
            str(row.form.wrong_in_form),
            str(row.form.right_otherwise),
            str(row.form.wrong_otherwise),
            row.form.form,
        )
        for row in rows
        if row.form is not None
    )
    header = ("suite", "in form, right", "in form, wrong", "otherwise, right", "otherwise, wrong", "form")
    return text_table(header, found, "Responses by form and answer:")


def protocols(rows: Sequence[ResultRow]) -> Table:
    """How the responses were sampled, where the results record it."""
    found = tuple((row.suite, *_protocol(row.protocol)) for row in rows if row.protocol is not None)
    header = ("suite", "template", "temperature", "top-p", "response tokens", "stops at", "engine")
    return text_table(header, found, "How the responses were sampled:")


def breakdowns(row: ResultRow) -> dict[str, Mapping[str, Breakdown]]:
    """The problems by `subject` and by `level`, those that there are."""
    return {kind: parts for kind, parts in (("subject", row.by_subject), ("level", row.by_level)) if parts}


def mean_accuracy(rows: Sequence[ResultRow]) -> str:
    """A sentence; empty for one row."""
    if len(rows) == 1:
        return ""
    mean = sum(row.accuracy for row in rows) / len(rows)
    return f"Mean of these {len(rows)} accuracies, each suite counted once: {_percent(mean)}."


def by_decoding(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """The rows of each decoding, in their order."""
    found: dict[str, list[ResultRow]] = {}
    for row in rows:
        found.setdefault(row.decoding, []).append(row)
    return found


def _of_decoding(name: str, rows: Sequence[ResultRow]) -> str:
    others = (health(rows), forms(rows), agreements(rows), choices(rows), protocols(rows))
    sections = [f"## {_escaped(name)}", *_section(scores(rows)), mean_accuracy(rows), _escaped(advice_on(rows) or "")]
    sections += [text for table in others for text in _section(table)]
    return "\n\n".join(filter(None, sections))


def _section(table: Table) -> list[str]:
    return [table.note, _markdown(table)] if table.rows else []


def _scores(row: ResultRow) -> tuple[str, ...]:
    low, high = row.interval
    return _percent(row.accuracy), f"{_percent(low)} to {_percent(high)}", row.method


def _votes(row: ResultRow) -> tuple[str, ...]:
    passes = ", ".join(f"{k}: {_percent(value)}" for k, value in row.pass_at_k.items())
    majority = ", ".join(f"{k}: {_percent(value)}" for k, value in row.maj_at_k.items())
    return passes or _NONE, majority or _NONE


def _health(row: ResultRow) -> tuple[str, ...]:
    responses = row.num_problems * row.num_samples
    lost = row.outcomes.get("timed_out", 0) + row.outcomes.get("crashed", 0)
    return (
        _percent(row.truncated_share),
        _percent(row.no_answer_share),
        _percent(row.outcomes.get("unparsable", 0) / responses),
        str(lost),
        f"{row.mean_tokens:.0f}",
        ", ".join(row.graders) or _NONE,
    )


def _protocol(protocol: SamplingProtocol) -> tuple[str, ...]:
    return (
        protocol.template,
        f"{protocol.temperature:g}" if protocol.temperature else "0 (greedy)",
        f"{protocol.top_p:g}",
        str(protocol.max_response_tokens),
        ", ".join(map(repr, protocol.stop)) or _NONE,
        protocol.engine,
    )


def _breakdowns(rows: Sequence[ResultRow]) -> list[str]:
    return [
        f"## {_escaped(row.suite)}, {_escaped(row.decoding)}: by {kind}\n\n{_label_table(kind, parts)}"
        for row in rows
        for kind, parts in breakdowns(row).items()
    ]


def _label_table(kind: str, labels: Mapping[str, Breakdown]) -> str:
    rows = [
        (name, str(part.num_problems), _percent(part.accuracy), " to ".join(map(_percent, part.interval)))
        for name, part in labels.items()
    ]
    return _markdown(text_table((kind, "problems", "accuracy", "interval"), rows))


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f}"


def _markdown(table: Table) -> str:
    rows = ([cell.plain for cell in row] for row in table.rows)
    lines = [table.header, ["---"] * len(table.header), *rows]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def _escaped(text: str) -> str:
    """Names come from configuration and data: they must not become markup."""
    return "".join("\\" + c if c in "|`*_<>[]#\\" else c for c in " ".join(text.split()))

"""`summary.md`: what `results.json` says, as tables that a person reads."""

from collections.abc import Callable, Mapping, Sequence

from luffy.evaluation.results import Breakdown, EvaluationResults, Protocol, ResultRow

SUMMARY_FILE = "summary.md"
_NONE = "-"


def render_summary(results: EvaluationResults) -> str:
    """Return the page in Markdown; shares in percent."""
    level = f"{100 * results.confidence:g} %"
    sections = [
        f"# Evaluation of `{results.checkpoint}`\n\nAccuracies are means over all responses (avg@k), in percent; the "
        f"intervals, at {level}, are over problems: what another set of problems of this kind would give.",
        *(_of_decoding(name, rows) for name, rows in _by_decoding(results.rows).items()),
        *_breakdowns(results.rows),
    ]
    return "\n\n".join(sections) + "\n"


def _of_decoding(name: str, rows: Sequence[ResultRow]) -> str:
    return "\n\n".join(
        [
            f"## {_escaped(name)}",
            _table(
                ("suite", "problems", "k", "accuracy", "interval", "its method", "pass@k", "maj@k"),
                [(row.suite, str(row.num_problems), str(row.num_samples), *_scores(row)) for row in rows],
            ),
            *_mean(rows),
            _table(
                ("suite", "truncated", "no answer", "unparsable", "timed out, crashed", "mean tokens", "graded by"),
                [(row.suite, *_health(row)) for row in rows],
            ),
            *_agreements(rows),
            *_choices(rows),
            *_protocols(rows),
        ]
    )


def _mean(rows: Sequence[ResultRow]) -> list[str]:
    if len(rows) == 1:
        return []
    mean = sum(row.accuracy for row in rows) / len(rows)
    return [f"Mean of these {len(rows)} accuracies, each suite counted once: {_percent(mean)}."]


def _agreements(rows: Sequence[ResultRow]) -> list[str]:
    found = [
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
    ]
    header = ("suite", "graders", "agree", "only the first says correct", "only the second", "accuracy by the second")
    return ["Two graders on the same responses:", _table(header, found)] if found else []


def _choices(rows: Sequence[ResultRow]) -> list[str]:
    found = [
        (
            row.suite,
            _percent(row.accuracy),
            _percent(row.choices.unparsed_share),
            _percent(row.choices.guess_adjusted),
            _percent(row.choices.chance),
        )
        for row in rows
        if row.choices is not None
    ]
    text = (
        "Multiple choice; the score adjusted for guessing counts a response that names no option as a guess, and is "
        "not an accuracy:"
    )
    header = ("suite", "accuracy", "names no option", "adjusted for guessing", "guessing alone")
    return [text, _table(header, found)] if found else []


def _protocols(rows: Sequence[ResultRow]) -> list[str]:
    found = [(row.suite, *_protocol(row.protocol)) for row in rows if row.protocol is not None]
    header = ("suite", "template", "temperature", "top-p", "response tokens", "stops at", "engine")
    return ["How the problems were asked:", _table(header, found)] if found else []


def _scores(row: ResultRow) -> tuple[str, ...]:
    passes = ", ".join(f"{k}: {_percent(value)}" for k, value in row.pass_at_k.items())
    majority = ", ".join(f"{k}: {_percent(value)}" for k, value in row.maj_at_k.items())
    low, high = row.interval
    return (
        _percent(row.accuracy),
        f"{_percent(low)} to {_percent(high)}",
        row.method,
        passes or _NONE,
        majority or _NONE,
    )


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


def _protocol(protocol: Protocol) -> tuple[str, ...]:
    return (
        protocol.template,
        f"{protocol.temperature:g}" if protocol.temperature else "0 (greedy)",
        f"{protocol.top_p:g}",
        str(protocol.max_response_tokens),
        ", ".join(map(repr, protocol.stop)) or _NONE,
        protocol.engine,
    )


def _breakdowns(rows: Sequence[ResultRow]) -> list[str]:
    kinds: list[tuple[str, Callable[[ResultRow], Mapping[str, Breakdown]]]] = [
        ("subject", lambda row: row.by_subject),
        ("level", lambda row: row.by_level),
    ]
    return [
        f"## {_escaped(row.suite)}, {_escaped(row.decoding)}: by {kind}\n\n{_label_table(kind, labels(row))}"
        for row in rows
        for kind, labels in kinds
        if labels(row)
    ]


def _label_table(kind: str, labels: Mapping[str, Breakdown]) -> str:
    rows = [
        (name, str(part.num_problems), _percent(part.accuracy), " to ".join(map(_percent, part.interval)))
        for name, part in labels.items()
    ]
    return _table((kind, "problems", "accuracy", "interval"), rows)


def _by_decoding(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    found: dict[str, list[ResultRow]] = {}
    for row in rows:
        found.setdefault(row.decoding, []).append(row)
    return found


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def _escaped(text: str) -> str:
    """Names come from configuration and data: they must not become markup."""
    return "".join("\\" + c if c in "|`*_<>[]#\\" else c for c in " ".join(text.split()))

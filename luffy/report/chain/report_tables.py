"""The tables of the report as rows of text and numbers, for both of its formats."""

from collections.abc import Callable, Mapping, Sequence

from luffy.data.pass_rates import DifficultyCard, Fit
from luffy.data.sample_card import SampleCard
from luffy.evaluation.checkpoint_scores import CheckpointScores
from luffy.evaluation.results import ResultRow, checkpoint_name
from luffy.pipeline.chain.manifest import Manifest
from luffy.report import wording
from luffy.report.chain.inputs import FinishedChain
from luffy.report.tables import Table, TableCell, Tone
from luffy.statistics.paired import BenchmarkComparison
from luffy.synthesis.synthesis_card import SynthesisCard


def accuracy_table(chain: FinishedChain, decoding: str) -> Table:
    """Accuracy in percent: one row per suite, one column per checkpoint."""
    rows = []
    for suite in chain.suites:
        found = [evaluation.row((suite, decoding)) for evaluation in chain.evaluations]
        problems = max(row.num_problems for row in found if row)
        name = TableCell(suite, (wording.count(problems, "problem"),))
        rows.append((name, *(_accuracy_cell(row) for row in found)))
    names = (checkpoint_name(evaluation.checkpoint) for evaluation in chain.evaluations)
    return Table(("suite", *names), tuple(rows))


def difference_table(chain: FinishedChain, decoding: str) -> Table:
    """Percentage points between consecutive checkpoints on the same problems."""
    header = tuple(_step_name(first, second) for first, second in chain.transitions)
    comparisons = [chain.comparison(first, second, decoding) for first, second in chain.transitions]
    rows = tuple(
        (TableCell(suite), *(_difference_cell(comparison.on(suite)) for comparison in comparisons))
        for suite in chain.suites
    )
    return Table(("suite", *header), rows)


def detail_table(chain: FinishedChain) -> Table:
    """Everything in the results: one row per checkpoint, suite and decoding."""
    header = (
        "checkpoint", "suite", "decoding", "problems", "samples each", "accuracy %", "interval", "pass@k %",
        "mean tokens", "truncated %", "other outcomes",
    )  # fmt: skip
    rows = tuple(
        tuple(TableCell(text) for text in (checkpoint_name(evaluation.checkpoint), *_details(row)))
        for evaluation in chain.evaluations
        for row in evaluation.results.rows
    )
    return Table(header, rows)


def data_table(card: Mapping[str, object]) -> Table:
    """Rows in and out of each source, and why the others were rejected."""
    sources = card.get("sources", {})
    assert isinstance(sources, Mapping)
    header = ("source", "kind", "rows in", "rows out", "traces", "rejected rows", "rejected traces", "malformed")
    lengths = ("prompt tokens", "trace tokens")
    rows = tuple(
        (
            TableCell(name),
            TableCell(str(source["kind"])),
            *(TableCell(f"{source[field]:,}") for field in ("rows_in", "rows_out", "traces_out")),
            TableCell(_tally(source["rejected"])),
            TableCell(_tally(source["rejected_traces"])),
            TableCell(f"{source['quarantined']:,}"),
            TableCell(_quantiles(source["prompt_tokens"])),
            TableCell(_quantiles(source["trace_tokens"])),
        )
        for name, source in sources.items()
    )
    return Table((*header, *lengths), rows)


def difficulty_tables(card: DifficultyCard) -> tuple[Table, Table]:
    """Which prompts RL was given, and how many were solved how often."""
    header = ("measured by", "responses", "bounds", "kept", "too hard", "too easy", "mean pass rate %", "truncated %")
    row = (
        checkpoint_name(card.policy),
        f"{card.num_samples} a prompt",
        f"{card.min_pass_rate:g} to {card.max_pass_rate:g}",
        *(f"{card.fits[fit]:,} of {card.prompts:,}" for fit in Fit),
        wording.percent(card.mean_pass_rate),
        wording.percent(card.truncated_share),
    )
    counts = (TableCell("prompts"), *(TableCell(f"{count:,}") for count in card.histogram.values()))
    return (
        Table(header, (tuple(TableCell(text) for text in row),)),
        Table((f"correct of {card.num_samples}", *card.histogram), (counts,)),
    )


def synthesis_table(card: SynthesisCard) -> Table:
    """Questions, correct answers, kept traces and costs of each teacher."""
    header = (
        "teacher", "model", "prompts", "answers", "pass rate %", "prompts solved", "traces", "tokens", "cost",
        "not asked",
    )  # fmt: skip
    rows = tuple(
        tuple(
            TableCell(text)
            for text in (
                name,
                teacher.model,
                f"{teacher.prompts:,}",
                f"{teacher.answers:,}",
                wording.percent(teacher.pass_rate),
                f"{teacher.solved:,}",
                f"{teacher.traces:,}",
                f"{teacher.prompt_tokens + teacher.num_tokens:,}",
                "-" if teacher.cost is None else f"{teacher.cost:.2f}",
                f"{teacher.not_asked:,}",
            )
        )
        for name, teacher in card.teachers.items()
    )
    return Table(header, rows)


def sample_table(cards: Sequence[SampleCard]) -> Table:
    """The policy's answers in each round, and the traces that were kept: one row per round."""
    header = (
        "round",
        "sampled",
        "responses",
        "mean pass rate %",
        "solved prompts",
        "traces",
        "mean tokens",
        "truncated %",
    )
    rows = tuple(
        (
            str(card.round),
            checkpoint_name(card.policy),
            f"{card.rates.num_samples} a prompt",
            wording.percent(card.rates.mean_pass_rate),
            f"{card.kept.prompts:,} of {card.rates.prompts:,}",
            f"{card.kept.traces:,}",
            f"{card.kept.mean_tokens:.1f}",
            wording.percent(card.rates.truncated_share),
        )
        for card in cards
    )
    return Table(header, tuple(tuple(TableCell(text) for text in row) for row in rows))


def stage_table(manifests: Mapping[str, Manifest]) -> Table:
    """The stages that ran: key, time, duration and size on disk."""
    header = ("stage", "key", "started", "took", "size", "resumed")
    rows = tuple(
        (
            TableCell(node),
            TableCell(manifest.key),
            TableCell(wording.timestamp(manifest.started)),
            TableCell(wording.duration(manifest.total_s)),
            TableCell(wording.size(sum(output.bytes for output in manifest.outputs))),
            TableCell(_resumed(manifest)),
        )
        for node, manifest in manifests.items()
    )
    return Table(header, rows)


def measure_table(chain: FinishedChain, decoding: str, measure: Callable[[Sequence[ResultRow]], Table]) -> Table:
    """`measure` for every checkpoint under a decoding: a row per suite and checkpoint, suites together."""
    header: tuple[str, ...] = ()
    found: list[tuple[str, tuple[TableCell, ...]]] = []
    for evaluation in chain.evaluations:
        table = measure([row for row in evaluation.results.rows if row.decoding == decoding])
        header = (table.header[0], "checkpoint", *table.header[1:])
        for suite, *values in table.rows:
            found.append((suite.text, (suite, TableCell(checkpoint_name(evaluation.checkpoint)), *values)))
    found.sort(key=lambda row: chain.suites.index(row[0]))  # stable: checkpoints stay in the order of the chain
    return Table(header, tuple(cells for _, cells in found))


def mapping_table(header: tuple[str, str], mapping: Mapping[str, str]) -> Table:
    """Names and values."""
    return Table(header, tuple((TableCell(name), TableCell(value)) for name, value in mapping.items()))


def _accuracy_cell(row: ResultRow | None) -> TableCell:
    return (
        TableCell("–") if row is None else TableCell(wording.percent(row.accuracy), (wording.interval(*row.interval),))
    )


def _difference_cell(row: BenchmarkComparison) -> TableCell:
    estimate = row.paired.difference
    tone: Tone = "" if not row.is_significant else "better" if estimate.value > 0 else "worse"
    counts = (f"{row.paired.wins} better,", f"{row.paired.losses} worse,", f"{row.paired.ties} same")
    return TableCell(
        wording.signed(estimate.value), (wording.signed_interval(row.paired), wording.adjusted_p(row), *counts), tone
    )


def _step_name(first: CheckpointScores, second: CheckpointScores) -> str:
    return f"{checkpoint_name(first.checkpoint)} → {checkpoint_name(second.checkpoint)}"


def _details(row: ResultRow) -> Sequence[str]:
    odd = {name: number for name, number in row.outcomes.items() if name not in ("correct", "wrong") and number}
    return (
        row.suite,
        row.decoding,
        f"{row.num_problems:,}",
        str(row.num_samples),
        wording.percent(row.accuracy),
        wording.interval(*row.interval),
        ", ".join(f"{k}: {wording.percent(value)}" for k, value in row.pass_at_k.items()) or "–",
        f"{row.mean_tokens:.0f}",
        wording.percent(row.truncated_share),
        _tally(odd),
    )


def _tally(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {number:,}" for name, number in counts.items()) or "–"


def _quantiles(quantiles: Mapping[str, int]) -> str:
    return f"{quantiles['p50']} (max {quantiles['max']})" if quantiles else "–"


def _resumed(manifest: Manifest) -> str:
    extended = f", continues {manifest.extended}" if manifest.extended else ""
    return (f"from step {manifest.resumed_from}" if manifest.resumed_from else "–") + extended

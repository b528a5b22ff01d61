"""The data card: where each prepared file came from, and what was removed and why."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from luffy.data.selection import Selection
from luffy.data.shards import ShardStatistics
from luffy.markdown_text import markdown_cell

_Name = TypeVar("_Name", bound=str)
_QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_MAX_HITS_SHOWN = 50
"""Rows that `card.md` lists for each source; `card.json` lists all."""


@dataclass(frozen=True, slots=True)
class SourceCard:
    """One source; `rows_in == rows_out + quarantined + sum(rejected.values()) + folded`."""

    name: str
    """`train`, `corpus` or `suites.<name>`."""
    kind: str
    inputs: Mapping[str, str]
    """What was read, with the sha256 of its bytes or of the generator's settings."""
    rows_in: int
    rows_out: int
    quarantined: int
    """Malformed rows, the first thousand of them in `quarantine.jsonl`."""
    remarks: Mapping[str, int]
    """Rows without a trace, by why: `all_traces_rejected` or `no_trace_given`; rows whose `own_system_prompt` stands in
    place of `data.system_prompt`."""
    malformed: Mapping[str, int]
    """Malformed rows by the field that is wrong; `(line)`: not JSON at all."""
    rejected: Mapping[str, int]
    rejected_traces: Mapping[str, int]
    """Traces by reason, also those of rows that passed with another trace."""
    longest_rejected: Mapping[str, int]
    """Tokens of the longest prompt, and of the longest trace, that were rejected for their length, by the reason."""
    traces_out: int
    trace_outcomes: Mapping[str, int]
    """Traces by outcome of grading, rejected ones included."""
    trace_authors: Mapping[str, int]
    """Traces that passed the rules for single rows, by author."""
    data_sources: Mapping[str, int]
    """Rows that passed the rules for single rows, by their `data_source`."""
    folded: int = 0
    """Rows that were joined to an earlier row with the same problem, which got the traces of training rows."""
    repeats: Mapping[str, int] = field(default_factory=dict)
    """Number of problems that had 2, 3, ... rows."""
    golds: Mapping[str, int] = field(default_factory=dict)
    """Result of grading reference answers against themselves (`luffy.data.row_filters.check_golds`)."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Columns of its files that are not read, with the number of the first rows (1000 of a file) that have a value."""
    gold_findings: Sequence[Mapping[str, object]] = ()
    hits: Sequence[Mapping[str, object]] = ()
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Quantiles over the rows that passed."""
    trace_tokens: Mapping[str, int] = field(default_factory=dict)
    """Quantiles over the traces that passed, stop token included."""


@dataclass(frozen=True, slots=True)
class DataCard:
    """All of `card.json`."""

    vocabulary_size: int
    sources: Sequence[SourceCard]
    checked: Mapping[str, int]
    """Benchmarks that training data was compared with, and their numbers of rows."""
    not_checked: Sequence[str]
    """Registered benchmarks that were not available."""
    outputs: Mapping[str, Mapping[str, object]]
    """Written files: rows, bytes, sha256."""


def source_card(
    name: str,
    kind: str,
    inputs: Mapping[str, str],
    statistics: ShardStatistics,
    selection: Selection,
    unread: Mapping[str, int],
    lengths: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]],
) -> SourceCard:
    """Return the card of one source; `lengths`: token counts of the remaining prompts, and of their traces."""
    prompts, traces = lengths
    return SourceCard(
        name=name,
        kind=kind,
        inputs=dict(inputs),
        rows_in=statistics.rows_in,
        rows_out=len(prompts),
        quarantined=statistics.malformed.total(),
        remarks=_sorted(statistics.remarks),
        malformed=_sorted(statistics.malformed),
        rejected=_sorted({**statistics.rejected, **selection.rejected}),
        rejected_traces=_sorted(statistics.rejected_traces),
        longest_rejected=_sorted(statistics.longest),
        traces_out=len(traces),
        trace_outcomes=_sorted(statistics.outcomes),
        trace_authors=_sorted(statistics.authors),
        data_sources=_sorted(statistics.data_sources),
        folded=int(selection.folded.sum()),
        repeats={str(size): count for size, count in selection.repeats().items()},
        golds=_sorted(+statistics.golds),
        unread=unread,
        gold_findings=statistics.gold_findings,
        hits=statistics.hits,
        prompt_tokens=quantiles(prompts),
        trace_tokens=quantiles(traces),
    )


def quantiles(lengths: Sequence[int] | npt.NDArray[np.int32]) -> dict[str, int]:
    """Return minimum, median, 90 %, 99 % and maximum, each a length that occurs; empty for no lengths."""
    if not len(lengths):
        return {}
    values = np.quantile(np.asarray(lengths), list(_QUANTILES.values()), method="inverted_cdf")
    return {name: int(value) for name, value in zip(_QUANTILES, values, strict=True)}


def card_json(card: DataCard) -> str:
    """Return the contents of `card.json`."""
    content = {
        "vocabulary_size": card.vocabulary_size,
        "benchmarks": {"checked": dict(card.checked), "not_checked": list(card.not_checked)},
        "sources": {source.name: asdict(source) for source in card.sources},
        "outputs": dict(card.outputs),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def card_markdown(card: DataCard) -> str:
    """Return the contents of `card.md`."""
    checked = ", ".join(f"{name} ({rows} rows)" for name, rows in card.checked.items()) or "none"
    not_checked = ", ".join(card.not_checked) or "none"
    overview = [
        (c.name, c.kind, c.rows_in, c.rows_out, sum(c.rejected.values()), c.folded, c.quarantined, c.traces_out)
        for c in card.sources
    ]
    files = [(name, file["rows"], file["bytes"], f"`{file['sha256']}`") for name, file in card.outputs.items()]
    headings = ("source", "kind", "rows in", "rows out", "rejected", "folded", "quarantined", "traces")
    lines = ["# Data card", "", f"Vocabulary: {card.vocabulary_size} tokens.", "", *_table(headings, overview), ""]
    lines += ["## Decontamination", "", f"Checked against: {checked}.", ""]
    lines += [f"Registered but not available, so not checked: {not_checked}.", ""]
    for source in card.sources:
        lines += [f"## {source.name}", ""]
        lines += [f"sha256 of {name}: `{digest}`" for name, digest in source.inputs.items()] + [""]
        counts = {
            "columns not read": source.unread,
            "malformed rows": source.malformed,
            "rejected rows": source.rejected,
            "rejected traces": source.rejected_traces,
            "remarks": source.remarks,
            "tokens of the longest": source.longest_rejected,
            "traces graded": source.trace_outcomes,
            "trace authors": source.trace_authors,
            "data sources": source.data_sources,
            "problems by rows folded into one": source.repeats,
            "reference answers": source.golds,
        }
        counted = [(what, name, number) for what, numbers in counts.items() for name, number in numbers.items()]
        lines += [*_table(("count", "value", "number"), counted), ""] if counted else []
        lengths = [("prompt", source.prompt_tokens), ("trace", source.trace_tokens)]
        found = [(what, *(numbers[name] for name in _QUANTILES)) for what, numbers in lengths if numbers]
        lines += [*_table(("tokens", *_QUANTILES), found), ""] if found else []
        golds = {"uid": "uid", "finding": "its reference answer", "outcome": "outcome"}
        hits = {"where": "where", "benchmark": "benchmark", "row": "its row", "share": "share of its word runs"}
        for columns, findings in ((golds, source.gold_findings), ({"uid": "uid", **hits}, source.hits)):
            shown = [[each[name] for name in columns] for each in findings[:_MAX_HITS_SHOWN]]
            lines += [*_table(list(columns.values()), shown), ""] if shown else []
            if len(findings) > len(shown):
                lines += [f"and {len(findings) - len(shown)} more in card.json.", ""]
    lines += ["## Files", "", *_table(("file", "rows", "bytes", "sha256"), files), ""]
    return "\n".join(lines) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    return lines + [f"| {' | '.join(markdown_cell(str(cell)) for cell in row)} |" for row in rows]


def _sorted(counts: Mapping[_Name, int]) -> dict[str, int]:
    return {str(name): count for name, count in sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))}

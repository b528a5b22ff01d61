"""The data card: where each prepared file came from, what was taken out of it and why."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np

from luffy.data.filters import Filtered
from luffy.data.sources import LoadedSource
from luffy.types import Outcome

_Name = TypeVar("_Name", bound=str)
_QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class SourceCard:
    """One source; `rows_in == rows_out + quarantined + sum(rejected.values())`."""

    name: str
    """`train`, `corpus` or `suites.<name>`."""
    kind: str
    source_sha256: str
    """Of the file's bytes, or of the generator's settings."""
    rows_in: int
    rows_out: int
    quarantined: int
    """Malformed rows; each stands in `quarantine.jsonl`."""
    rejected: Mapping[str, int]
    """Rows by reason."""
    rejected_traces: Mapping[str, int]
    """Traces by reason, also those of rows that passed with another trace."""
    traces_out: int
    trace_outcomes: Mapping[str, int]
    """What grading found, over all traces of the source."""
    trace_authors: Mapping[str, int]
    """Traces that passed, by author."""
    data_sources: Mapping[str, int]
    """Rows that passed, by their `data_source`."""
    prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Quantiles over the rows that passed."""
    trace_tokens: Mapping[str, int] = field(default_factory=dict)
    """Quantiles over the traces that passed, stop token included."""


def source_card(name: str, loaded: LoadedSource, outcomes: Mapping[Outcome, int], filtered: Filtered) -> SourceCard:
    """Return the account of one source."""
    traces = [trace for prompt in filtered.prompts for trace in prompt.traces]
    return SourceCard(
        name=name,
        kind=loaded.kind,
        source_sha256=loaded.sha256,
        rows_in=loaded.num_rows,
        rows_out=len(filtered.prompts),
        quarantined=len(loaded.quarantined),
        rejected=_sorted(filtered.rejected),
        rejected_traces=_sorted(filtered.rejected_traces),
        traces_out=len(traces),
        trace_outcomes=_sorted(outcomes),
        trace_authors=_sorted(Counter(trace.author for trace in traces)),
        data_sources=_sorted(Counter(prompt.data_source for prompt in filtered.prompts)),
        prompt_tokens=quantiles(filtered.prompt_tokens),
        trace_tokens=quantiles(filtered.trace_tokens),
    )


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Return minimum, median, 90 %, 99 % and maximum, each a length that occurs; empty for no lengths."""
    if not lengths:
        return {}
    values = np.quantile(np.asarray(lengths), list(_QUANTILES.values()), method="inverted_cdf")
    return {name: int(value) for name, value in zip(_QUANTILES, values, strict=True)}


def card_json(cards: Sequence[SourceCard], vocabulary_size: int) -> str:
    """Return the card for machines."""
    content = {"vocabulary_size": vocabulary_size, "sources": {card.name: asdict(card) for card in cards}}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def card_markdown(cards: Sequence[SourceCard], vocabulary_size: int) -> str:
    """Return the card for people."""
    lines = ["# Data card", "", f"Vocabulary: {vocabulary_size} tokens.", "", *_overview(cards), ""]
    for card in cards:
        lines += _section(card)
    return "\n".join(lines) + "\n"


def _overview(cards: Sequence[SourceCard]) -> list[str]:
    return _table(
        ("source", "kind", "rows in", "rows out", "rejected", "quarantined", "traces"),
        [(c.name, c.kind, c.rows_in, c.rows_out, sum(c.rejected.values()), c.quarantined, c.traces_out) for c in cards],
    )


def _section(card: SourceCard) -> list[str]:
    lines = [f"## {card.name}", "", f"sha256 of the source: `{card.source_sha256}`", ""]
    counts = {
        "rejected rows": card.rejected,
        "rejected traces": card.rejected_traces,
        "traces graded": card.trace_outcomes,
        "trace authors": card.trace_authors,
        "data sources": card.data_sources,
    }
    rows = [(what, name, number) for what, numbers in counts.items() for name, number in numbers.items()]
    if rows:
        lines += [*_table(("what", "which", "count"), rows), ""]
    lengths = [(what, *q.values()) for what, q in _lengths(card).items() if q]
    if lengths:
        lines += [*_table(("tokens", *_QUANTILES), lengths), ""]
    return lines


def _lengths(card: SourceCard) -> dict[str, Mapping[str, int]]:
    return {"prompt": card.prompt_tokens, "trace, with stop token": card.trace_tokens}


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells]


def _sorted(counts: Mapping[_Name, int]) -> dict[str, int]:
    return {str(name): count for name, count in sorted(counts.items())}

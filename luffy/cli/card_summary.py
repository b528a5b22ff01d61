"""The data card in a table and a few lines; the whole of it is `card.md`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CARD_FILE = "card.json"
_QUARANTINE_FILE = "quarantine.jsonl"
_HEADER = ("source", "kind", "rows in", "rows out", "rejected", "folded", "quarantined", "traces", "tokens of prompts")


@dataclass(frozen=True, slots=True)
class CardSummary:
    """What a terminal shows of a data card."""

    header: tuple[str, ...]
    rows: list[list[str]]
    """One row per source."""
    notes: list[str]


def summarise_card(directory: Path) -> CardSummary:
    """The summary of the card in the `directory` of a finished `prepare_data`. It names no row, only counts them."""
    card = json.loads((directory / _CARD_FILE).read_text(encoding="utf-8"))
    sources: Mapping[str, Mapping[str, Any]] = card["sources"]
    malformed = [_malformed(name, source) for name, source in sources.items() if source["quarantined"]]
    notes = [*malformed, f"Each malformed row: {directory / _QUARANTINE_FILE}"] if malformed else []
    notes += [_reasons(name, source) for name, source in sources.items() if source["rejected"]]
    notes += [_replays(name, source) for name, source in sources.items() if source.get("replays")]
    notes += [_golds(name, source) for name, source in sources.items() if source["gold_findings"]]
    notes.append(_benchmarks(card["benchmarks"]))
    notes.append(f"The whole card: {directory / 'card.md'}")
    return CardSummary(_HEADER, [_row(name, source) for name, source in sources.items()], notes)


def _row(name: str, source: Mapping[str, Any]) -> list[str]:
    rejected, lengths = sum(source["rejected"].values()), source["prompt_tokens"]
    counts = (source["rows_in"], source["rows_out"], rejected, source["folded"], source["quarantined"])
    tokens = f"{lengths['min']} to {lengths['max']}, median {lengths['p50']}" if lengths else "-"
    return [name, source["kind"], *map(str, counts), str(source["traces_out"]), tokens]


def _malformed(name: str, source: Mapping[str, Any]) -> str:
    fields = ", ".join(f"{field} {count}" for field, count in source["malformed"].items())
    return f"Malformed in {name}, by field: {fields}"


def _reasons(name: str, source: Mapping[str, Any]) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in source["rejected"].items())
    return f"Rejected of {name}: {reasons}"


def _replays(name: str, source: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{finding} {count}" for finding, count in source["replays"].items())
    return f"Traces of {name} played again in the environment: {counts}"


def _golds(name: str, source: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{finding.replace('_', ' ')} {count}" for finding, count in source["golds"].items())
    return f"Reference answers of {name}: {counts}"


def _benchmarks(found: Mapping[str, Any]) -> str:
    checked, missing = ", ".join(found["checked"]) or "none", ", ".join(found["not_checked"]) or "none"
    return f"Training data was checked against: {checked}; not available: {missing}"

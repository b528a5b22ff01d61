"""One result of a check of this machine."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; all but `ok` carry a remedy."""

    check: str
    severity: Severity
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, "ok", found)


def note(check: str, found: str, remedy: str) -> Finding:
    """Some runs would fail or be slow."""
    return Finding(check, "note", found, remedy)


def broken(check: str, found: str, remedy: str) -> Finding:
    """Every run, or every run on this machine's GPUs, would fail."""
    return Finding(check, "broken", found, remedy)

"""Graded episodes on the terminal: accuracy and measures in a table, then some transcripts."""

from collections.abc import Sequence
from statistics import fmean

from luffy.cli.console import say, text_table, wide_terminal
from luffy.evaluation.sample_records import SampleRecord


def show_records(records: Sequence[SampleRecord], num_shown: int) -> None:
    """Print the table, and the first `num_shown` episodes that may be shown."""
    shown = [record for record in records if record.may_be_shown][:num_shown]
    for record in shown:
        say(f"=== {record.uid} #{record.sample}: {record.outcome} ({record.reason})\n{record.prompt}\n")
        say(f"{record.response}\n")
    suites = list(dict.fromkeys(record.suite for record in records))
    by_suite = [[record for record in records if record.suite == suite] for suite in suites]
    names = list(dict.fromkeys(name for record in records for name in record.measures))
    rows = [["episodes", *(str(len(found)) for found in by_suite)]]
    rows.append(["accuracy", *(f"{fmean(record.correct for record in found):.1%}" for found in by_suite)])
    rows.append(["tokens", *(f"{fmean(record.num_tokens for record in found):.4g}" for found in by_suite)])
    rows += [[name, *(_mean(name, found) for found in by_suite)] for name in names]
    rows += [[f"ended by {reason}", *(_share(reason, found) for found in by_suite)] for reason in _reasons(records)]
    wide_terminal().print(text_table(["mean of", *suites], rows))


def _mean(name: str, records: Sequence[SampleRecord]) -> str:
    values = [record.measures[name] for record in records if name in record.measures]
    return f"{fmean(values):.4g}" if values else "-"


def _reasons(records: Sequence[SampleRecord]) -> list[str]:
    return sorted({record.finish_reason for record in records})


def _share(reason: str, records: Sequence[SampleRecord]) -> str:
    return f"{fmean(record.finish_reason == reason for record in records):.1%}"

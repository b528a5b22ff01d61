"""Comparison of two runs as table rows: stages by key, newest metrics, accuracies with paired differences."""

from collections.abc import Mapping
from itertools import islice

from luffy.cli.accuracies import RESULTS_FILE
from luffy.cli.run_view import Rows, final_metrics, number
from luffy.pages.headline import HEADLINE_METRICS
from luffy.pipeline.chain.differences import differences
from luffy.pipeline.chain.identity import read_identity
from luffy.pipeline.chain.manifest import read_manifest
from luffy.pipeline.workspace.records import RunRecord, StageEntry
from luffy.tracking.metrics import Json

STAGE_HEADER = ("stage", "first", "second", "")
METRIC_HEADER = ("stage", "metric", "first", "second", "difference")
_SHOWN = 3
_ABSENT = "-"


def stage_rows(first: RunRecord, second: RunRecord) -> Rows:
    """One row per stage of either run: the keys, and why they differ."""
    rows, nodes = [], {entry.key: name for name, entry in second.stages.items()}
    for node in dict.fromkeys([*first.stages, *second.stages]):
        one, other = first.stages.get(node), second.stages.get(node)
        keys = [entry.key if entry is not None else _ABSENT for entry in (one, other)]
        found = _why(one, other, nodes) if one is not None and other is not None else "only in one of the two"
        rows.append([node, *keys, found])
    return rows


def metric_rows(first: RunRecord, second: RunRecord, *, everything: bool) -> Rows:
    """One row per metric that both have logged, in stages with different results; times are left out."""
    old, new = final_metrics(first), final_metrics(second)
    apart = {node for node in _shared(first, second) if first.stages[node].key != second.stages[node].key}
    rows = []
    for (node, name), value in old.items():
        if node in apart and (node, name) in new and (everything or name in ("step", *HEADLINE_METRICS)):
            other = new[node, name]
            rows.append([node, name, number(value), number(other), _change(value, other)])
    return rows


def _change(value: Json, other: Json) -> str:
    if isinstance(value, int | float) and isinstance(other, int | float):
        return f"{other - value:+.4g}"
    return ""


def compared_evaluations(first: RunRecord, second: RunRecord) -> list[tuple[str, StageEntry, StageEntry]]:
    """The evaluations that both runs have finished, with both results; identical ones are left out."""
    pairs = [(node, first.stages[node], second.stages[node]) for node in _shared(first, second)]
    return [pair for pair in pairs if pair[1].key != pair[2].key and all(map(_is_evaluated, pair[1:]))]


def _shared(first: RunRecord, second: RunRecord) -> list[str]:
    return [node for node in first.stages if node in second.stages]


def _is_evaluated(entry: StageEntry) -> bool:
    return read_manifest(entry.directory) is not None and (entry.directory / RESULTS_FILE).is_file()


def _why(one: StageEntry, other: StageEntry, nodes: Mapping[str, str]) -> str:
    if one.key == other.key:
        return "the same"
    records = read_identity(one.directory), read_identity(other.directory)
    if records[0] is None or records[1] is None:
        return "differs"
    after = records[1].identity
    inputs = {name: nodes.get(key, name) for name, key in after.upstream.items()}
    found = list(differences(records[0].identity, after, inputs))
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(islice(found, _SHOWN))}{more}"

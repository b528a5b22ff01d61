"""A run as table rows (its stages, their origins and their results), and its curves as pictures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from luffy.cli.accuracies import RESULTS_FILE, Accuracy, read_accuracies
from luffy.cli.console import duration
from luffy.cli.inventory import stage_state
from luffy.errors import ConfigError
from luffy.files import write_atomic
from luffy.json_text import parse_json
from luffy.pipeline.graph import nodes_showing
from luffy.pipeline.identity import IdentityRecord, Json, read_identity
from luffy.pipeline.manifest import Manifest, read_manifest
from luffy.pipeline.records import RunRecord, StageEntry
from luffy.report.curves import HEADLINE_METRICS, Panel, panel_charts, rl_panels, supervised_panels
from luffy.report.figures import picture
from luffy.tracking.metrics import METRICS_FILE, read_last_lines, read_metrics

Rows = list[list[str]]
STAGE_HEADER = ("stage", "state", "key", "took", "this run")
LINEAGE_HEADER = ("stage", "reads", "what", "content")
_LAST_LINE_BYTES = 1 << 16
_DIGITS = 16
_CARD_FILE = "card.json"


def stage_rows(record: RunRecord) -> Rows:
    """One row per stage."""
    return [
        [node, stage_state(entry.directory), entry.key, _took(read_manifest(entry.directory)), _done(entry)]
        for node, entry in record.stages.items()
    ]


def lineage_rows(record: RunRecord) -> Rows:
    """One row per input of a stage, down to the raw data: which stage's result or file, and the hash of its content."""
    nodes = {entry.key: node for node, entry in record.stages.items()}
    rows = []
    for node, entry in record.stages.items():
        identity = read_identity(entry.directory)
        inputs = _inputs(entry.directory, identity, nodes) if identity is not None else iter([["?", "not begun", ""]])
        for index, row in enumerate(inputs):
            rows.append([node if index == 0 else "", *row])
    return rows


def last_metrics(record: RunRecord, *, everything: bool = False) -> tuple[list[str], Rows]:
    """Header and rows of the newest metrics: one row per metric, one column per stage that logs metrics."""
    newest = {node: values for node, entry in record.stages.items() if (values := newest_metrics(entry.directory))}
    names = list(dict.fromkeys(name for values in newest.values() for name in values if name != "step"))
    shown = names if everything else [name for name in HEADLINE_METRICS if name in names]
    rows = [[name, *(_number(values.get(name)) for values in newest.values())] for name in shown]
    return ["metric", *(f"{node} step {_number(values.get('step'))}" for node, values in newest.items())], rows


def newest_metrics(directory: Path) -> Mapping[str, Json]:
    """The last line of a stage's metrics; empty without one."""
    lines = read_last_lines(directory / METRICS_FILE, _LAST_LINE_BYTES)
    return lines[-1] if lines else {}


def accuracies(record: RunRecord) -> list[Accuracy]:
    """Accuracies of every finished evaluation; those of a sweep by their step."""
    found = []
    for entry in record.stages.values():
        if read_manifest(entry.directory) is None:
            continue
        if (entry.directory / RESULTS_FILE).is_file():
            found += read_accuracies([entry.directory])
        for step in sorted(entry.directory.glob(f"step_*/{RESULTS_FILE}")):
            label = step.parent.name.replace("_", " ")
            found += [replace(cell, checkpoint=label) for cell in read_accuracies([step.parent])]
    return found


def write_pictures(record: RunRecord, folder: Path) -> list[Path]:
    """Write an SVG per training stage to `folder`, with the panels of the report; returns the files.

    Raises ConfigError where the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--svg {folder}: cannot be made ({error.strerror}); give another folder") from None
    files = []
    for node in nodes_showing("training_curves", record.stages):
        rows = read_metrics(record.stages[node].directory / METRICS_FILE)
        if rows and (charts := panel_charts(_panels(record, node), rows)):
            files.append(folder / f"{record.name}-{node}.svg")
            write_atomic(files[-1], picture(charts, columns=3))
    return files


def _panels(record: RunRecord, node: str) -> Sequence[Panel]:
    if node != "rl":
        return supervised_panels()
    config = record.configuration
    return rl_panels(config.objective.terms if config is not None and config.objective is not None else ())


def _inputs(directory: Path, record: IdentityRecord, nodes: Mapping[str, str]) -> Iterator[list[str]]:
    for name, key in record.identity.upstream.items():
        yield [name, f"{nodes.get(key, 'stage')} {key}", record.consumed.get(name, "")[:_DIGITS]]
    for name, content in record.identity.files.items():
        yield ["file", name, content[:_DIGITS]]
    if record.identity.stage == "prepare_data":
        yield from _raw_data(directory, record.identity.settings)


def _raw_data(directory: Path, settings: Mapping[str, Json]) -> Iterator[list[str]]:
    """Each source with what was read of it, and the hash of that, once it has been read."""
    data = settings.get("data")
    sources = {name: data.get(name) for name in ("train", "corpus")} if isinstance(data, dict) else {}
    suites = data.get("suites") if isinstance(data, dict) else None
    sources |= {f"suites.{name}": source for name, source in suites.items()} if isinstance(suites, dict) else {}
    card = _read_card(directory)
    for name, source in sources.items():
        if isinstance(source, dict):
            words, made = _source_words(source, settings.get("seed")), card.get(name)
            read = made.get("inputs") if isinstance(made, dict) else None
            if not isinstance(read, dict) or not read:
                yield [f"data.{name}", words, ""]
            for index, (what, content) in enumerate(read.items() if isinstance(read, dict) else ()):
                yield [f"data.{name}", f"{words}: {what}" if index == 0 else what, str(content)[:_DIGITS]]


def _source_words(source: Mapping[str, Json], seed: Json) -> str:
    kind = source.get("kind")
    if kind == "hub":
        return f"hub {source.get('path')} {source.get('split')}@{source.get('revision')}"
    if kind in ("file", "custom"):
        return f"{kind} {source.get('path') or source.get('factory')}"
    parts = source.get("parts")
    if isinstance(parts, dict):
        return f"{kind} of {', '.join(parts)}"
    return f"{kind}, generated by seed {seed}"


def _read_card(directory: Path) -> Mapping[str, Json]:
    try:
        return parse_json((directory / _CARD_FILE).read_text(encoding="utf-8"))["sources"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # not written yet, or by another version


def _took(manifest: Manifest | None) -> str:
    if manifest is None:
        return "-"
    resumed = f" (from step {manifest.resumed_from})" if manifest.resumed_from else ""
    return duration(manifest.total_s) + resumed


def _done(entry: StageEntry) -> str:
    return f"{entry.action}: {entry.reason}" if entry.reason else entry.action


def _number(value: Json) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""A workspace's runs and results, and a run's stages, lineage, metrics and accuracies, as rows of tables."""

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from luffy.api.runs import Accuracy, read_accuracies
from luffy.cli.console import say, show_rows, show_table
from luffy.config import STAGE_KINDS, ExperimentConfig
from luffy.config.fields import all_fields
from luffy.json_text import parse_json
from luffy.pipeline.disk import measure
from luffy.pipeline.identity import Json, read_identity
from luffy.pipeline.lock import holder_of
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest
from luffy.pipeline.plan import flatten
from luffy.pipeline.records import RunRecord, list_records
from luffy.pipeline.reuse import newest_checkpoint
from luffy.pipeline.workspace import RUN_FILE, Workspace
from luffy.report.cells import Table, TableCell, accuracy, duration, size_words, sources_table, table, tally
from luffy.report.curves import HEADLINE_METRICS
from luffy.statistics.accuracy import Estimate
from luffy.tracking.metrics import METRICS_FILE, read_last_lines

_CARD_FILE = "card.json"
_MAX_TEXT = 100
_LAST_LINE_BYTES = 1 << 16
_DIGITS = 16


def take_stock(workspace: Workspace, tags: Collection[str] = ()) -> tuple[Table, Table]:
    """Runs that have all `tags`, the newest first, and results of stages, in the order of the chain.

    The size of a run is that of its directory and of its stages, which other runs may share.
    """
    records = [record for record in list_records(workspace) if record.tags.issuperset(tags)]
    there = [folder.name for folder in workspace.stages.iterdir()] if workspace.stages.is_dir() else []
    kinds = [*STAGE_KINDS, *sorted(name for name in {*there} - {*STAGE_KINDS} if not name.startswith("."))]
    directories = [(stage, directory) for stage in kinds for directory in workspace.siblings(stage)]
    sizes = {directory.name: measure(directory) for _, directory in directories}
    users: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda record: record.name):
        for key in dict.fromkeys(entry.key for entry in record.stages.values()):
            users.setdefault(key, []).append(record.name)
    runs = []
    for record in records:
        of_stages = sum(sizes.get(key, 0) for key in {entry.key for entry in record.stages.values()})
        size, age = size_words(measure(record.directory) + of_stages), _age(record.directory / RUN_FILE)
        words = " ".join([*(f"#{tag}" for tag in sorted(record.tags)), record.note])
        runs.append([record.name, record.condition, age, size, ", ".join(record.stages), words.strip()])
    noted = ("note",) if any(row[-1] for row in runs) else ()
    results = []
    for stage, directory in directories:
        manifest, name = directory / MANIFEST_FILE, directory.name
        age, size = _age(manifest if manifest.exists() else directory), size_words(sizes[name])
        results.append([stage, name, stage_state(directory), age, size, ", ".join(users.get(name, [])) or "-"])
    return (
        table(("run", "state", "age", "size", "stages", *noted), [row if noted else row[:-1] for row in runs]),
        table(("stage", "key", "state", "age", "size", "used by"), results),
    )


def stage_state(directory: Path) -> str:
    """`finished`, `running (pid 17 on host)`, `damaged (FILE)`, `interrupted (step 40)`, `gone`."""
    if not directory.is_dir():
        return "gone"
    holder = holder_of(directory)
    if holder:
        return f"running ({holder})"
    manifest = read_manifest(directory)
    if manifest is not None:
        damaged = manifest.damaged(directory)
        return f"damaged ({next(iter(damaged))})" if damaged else "finished"
    newest = newest_checkpoint(directory)
    return f"interrupted (step {newest[0]})" if newest else "interrupted"


def _age(path: Path) -> str:
    return duration(max(0.0, time.time() - path.stat().st_mtime))


def show_settings(config: ExperimentConfig, *, everything: bool) -> None:
    """Print the fields that are not at their defaults, entries of lists by name; with `everything` all of them."""
    chosen, whole = (dict(flatten(config.model_dump(mode="json", exclude_defaults=only))) for only in (True, False))
    defaults = {field.path: field.default or "" for field in all_fields()}
    own = [(path, _text(value), defaults.get(path, "")) for path, value in chosen.items()]
    same = [(path, _text(value)) for path, value in whole.items() if path not in chosen]
    show_rows(("field", "value", "default"), own, "\nConfiguration")
    if everything:
        show_rows(("field", "value"), same, "\nAt their defaults")
    else:
        say(f"{len(same)} more fields are at their defaults (--all shows them)")


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 3]}..."


def stages_of(record: RunRecord) -> Table:
    """One row per stage."""
    rows = []
    for node, entry in record.stages.items():
        manifest, took = read_manifest(entry.directory), "-"
        if manifest is not None:
            resumed = f" (from step {manifest.resumed_from})" if manifest.resumed_from else ""
            took = duration(manifest.total_s) + resumed
        done = f"{entry.action}: {entry.reason}" if entry.reason else entry.action
        rows.append((node, stage_state(entry.directory), entry.key, took, done))
    return table(("stage", "state", "key", "took", "this run"), rows)


def lineage(record: RunRecord) -> Table:
    """One row per input of a stage, down to the raw data: which stage's result or file, and the hash of its content."""
    nodes = {entry.key: node for node, entry in record.stages.items()}
    rows = list[list[str]]()
    for node, entry in record.stages.items():
        inputs, found = [["?", "not begun", ""]], read_identity(entry.directory)
        if found is not None:
            stage = found.identity
            inputs = [
                [name, f"{nodes.get(key, 'stage')} {key}", found.consumed.get(name, "")[:_DIGITS]]
                for name, key in stage.upstream.items()
            ]
            inputs += [["file", name, content[:_DIGITS]] for name, content in stage.files.items()]
            for name, source in _sources(entry.directory).items() if stage.stage == "prepare_data" else ():
                read = source["inputs"].items()
                inputs += [[f"data.{name}", f"{source['kind']}: {what}", content[:_DIGITS]] for what, content in read]
        rows += [[node if index == 0 else "", *row] for index, row in enumerate(inputs)]
    return table(("stage", "reads", "what", "content"), rows)


def _sources(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """What the data card of `prepare_data` says of each source; empty before there is one."""
    file = directory / _CARD_FILE
    return parse_json(file.read_text(encoding="utf-8"))["sources"] if file.exists() else {}


def last_metrics(record: RunRecord, *, everything: bool = False) -> Table:
    """The newest metrics: one row per metric, one column per stage that logs metrics."""
    newest: dict[str, Mapping[str, Json]] = {}
    for node, entry in record.stages.items():
        if lines := read_last_lines(entry.directory / METRICS_FILE, _LAST_LINE_BYTES):
            newest[node] = lines[-1]
    names = list(dict.fromkeys(name for values in newest.values() for name in values if name != "step"))
    shown = names if everything else [name for name in HEADLINE_METRICS if name in names]
    rows = ((name, *(_number(values.get(name)) for values in newest.values())) for name in shown)
    return table(("metric", *(f"{node} step {_number(values.get('step'))}" for node, values in newest.items())), rows)


def _number(value: Json) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def accuracy_table(cells: Sequence[Accuracy]) -> Table:
    """One row per suite and decoding, one column per checkpoint.

    Rows are sorted by decoding, then by suite, each in the order of the configuration.
    """
    found: dict[tuple[str, str], dict[str, TableCell]] = {}
    for cell in cells:
        shown = accuracy(Estimate(cell.accuracy, *cell.interval, "", 0))
        found.setdefault((cell.suite, cell.decoding), {})[cell.checkpoint] = shown
    checkpoints = dict.fromkeys(cell.checkpoint for cell in cells)
    decodings = [decoding for _, decoding in found]
    rows = sorted(found.items(), key=lambda row: decodings.index(row[0][1]))
    shown_rows = ((*key, *(by_checkpoint.get(name, "-") for name in checkpoints)) for key, by_checkpoint in rows)
    return table(("suite", "decoding", *checkpoints), shown_rows)


def show_results(stages: Iterable[Path], page: Path | None = None, config: ExperimentConfig | None = None) -> None:
    """Print the accuracies in these stage directories, if there are any, and where the page is.

    `config`: that of their run, which may have names for its checkpoints.
    """
    if found := read_accuracies(stages, {} if config is None else config.checkpoint_names):
        show_table(accuracy_table(found), "Accuracy in % with its interval")
    if page is not None:
        say(f"report: {page}")


def show_card(directory: Path) -> None:
    """Print what a finished `prepare_data` has read and kept: only counts, no row of the data."""
    card = parse_json((directory / _CARD_FILE).read_text(encoding="utf-8"))
    sources: Mapping[str, Mapping[str, Any]] = card["sources"]
    show_table(sources_table(sources), "Rows by source")
    for name, source in sources.items():
        if source["gold_findings"]:
            say(f"Reference answers of {name}: {tally(source['golds'])}")
    checked, missing = (", ".join(card["benchmarks"][key]) or "none" for key in ("checked", "not_checked"))
    say(f"Training data was checked against: {checked}; not available: {missing}")
    malformed = f"; malformed rows: {directory / 'quarantine.jsonl'}"
    say(f"The whole card: {directory / 'card.md'}{malformed if any(s['malformed'] for s in sources.values()) else ''}")

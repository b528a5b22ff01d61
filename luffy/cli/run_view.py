"""A workspace's runs and results, and a run's stages, lineage, metrics, accuracies and curves, as rows of tables."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from luffy.cli.console import duration, say, show_table, size_words
from luffy.config import STAGE_KINDS, ExperimentConfig
from luffy.config.strict import StrictModel
from luffy.errors import ConfigError
from luffy.files import write_atomic
from luffy.json_text import parse_json
from luffy.pipeline.disk import measure
from luffy.pipeline.graph import nodes_showing
from luffy.pipeline.identity import Json, read_identity
from luffy.pipeline.lock import holder_of
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest
from luffy.pipeline.records import RunRecord, list_records
from luffy.pipeline.reuse import newest_checkpoint
from luffy.pipeline.workspace import RUN_FILE, Workspace
from luffy.report.cells import Table, accuracy, table
from luffy.report.curves import HEADLINE_METRICS, panel_charts, rl_panels, supervised_panels
from luffy.report.figures import picture
from luffy.statistics.accuracy import Estimate
from luffy.tracking.metrics import METRICS_FILE, read_last_lines, read_metrics

_CARD_HEADER = (
    "source", "kind", "rows in", "rows out", "rejected", "folded", "quarantined", "traces", "tokens of prompts",
)  # fmt: skip
_CARD_FILE = "card.json"
_RESULTS_FILE = "results.json"
_SECTION = "(section)"
_MAX_TEXT = 100
_LAST_LINE_BYTES = 1 << 16
_DIGITS = 16


def take_stock(workspace: Workspace) -> tuple[Table, Table]:
    """Runs, the newest first, and results of stages, in the order of the chain.

    The size of a run is that of its directory and of its stages, which other runs may share.
    """
    records = list_records(workspace)
    directories = [(stage, directory) for stage in STAGE_KINDS for directory in workspace.siblings(stage)]
    sizes = {directory.name: measure(directory) for _, directory in directories}
    users: dict[str, list[str]] = {}
    for record in sorted(records, key=lambda record: record.name):
        for key in dict.fromkeys(entry.key for entry in record.stages.values()):
            users.setdefault(key, []).append(record.name)
    runs = []
    for record in records:
        of_stages = sum(sizes.get(key, 0) for key in {entry.key for entry in record.stages.values()})
        size, age = size_words(measure(record.directory) + of_stages), _age(record.directory / RUN_FILE)
        runs.append([record.name, record.condition, age, size, ", ".join(record.stages)])
    results = []
    for stage, directory in directories:
        manifest, name = directory / MANIFEST_FILE, directory.name
        age, size = _age(manifest if manifest.exists() else directory), size_words(sizes[name])
        results.append([stage, name, stage_state(directory), age, size, ", ".join(users.get(name, [])) or "-"])
    return (
        table(("run", "state", "age", "size", "stages"), runs),
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


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration."""

    path: str
    """Dotted, as an override names it; an entry of a list by its name, else by its number."""
    value: str
    default: str | None
    """None: it has none, and had to be given."""

    @property
    def is_default(self) -> bool:
        return self.value == self.default


def settings_of(model: StrictModel, base: StrictModel | None = None, prefix: str = "") -> list[Setting]:
    """Every field of `model`, in its order; `prefix`: the path of the field that holds it.

    `base`: what that field has by default, where this is of the same class.
    """
    found = list[Setting]()
    for name, info in type(model).model_fields.items():
        default = info.get_default(call_default_factory=True) if base is None else getattr(base, name)
        found += _setting(f"{prefix}{name}", getattr(model, name), default)
    return found


def _setting(path: str, value: object, default: object) -> Iterator[Setting]:
    if isinstance(value, StrictModel):
        found = settings_of(value, default if type(default) is type(value) else None, f"{path}.")
        if not isinstance(default, StrictModel) and all(setting.is_default for setting in found):
            yield Setting(path, _SECTION, _default_text(default))
        yield from found
    elif isinstance(value, Mapping) and any(isinstance(below, StrictModel) for below in value.values()):
        for key, below in value.items():
            yield from _setting(f"{path}.{key}", below, PydanticUndefined)
    elif isinstance(value, tuple) and any(isinstance(below, StrictModel) for below in value):
        for index, below in enumerate(value):
            yield from _setting(f"{path}.{getattr(below, 'name', index)}", below, PydanticUndefined)
    else:
        yield Setting(path, _text(value), _default_text(default))


def _default_text(default: object) -> str | None:
    return None if default is PydanticUndefined else _text(default)


def _text(value: object) -> str:
    def plain(value: object) -> object:
        if isinstance(value, StrictModel):
            return value.model_dump(mode="json")
        return list(value) if isinstance(value, Sequence | set | frozenset) else str(value)

    text = value if isinstance(value, str) else json.dumps(value, default=plain, ensure_ascii=False)
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
            inputs += _raw_data(entry.directory, stage.settings) if stage.stage == "prepare_data" else []
        rows += [[node if index == 0 else "", *row] for index, row in enumerate(inputs)]
    return table(("stage", "reads", "what", "content"), rows)


def _raw_data(directory: Path, settings: Mapping[str, Json]) -> Iterator[list[str]]:
    """Each source with what was read of it, and the hash of that, once it has been read."""
    data = settings.get("data")
    sources = {name: data.get(name) for name in ("train", "corpus")} if isinstance(data, dict) else {}
    suites = data.get("suites") if isinstance(data, dict) else None
    sources |= {f"suites.{name}": source for name, source in suites.items()} if isinstance(suites, dict) else {}
    try:
        card = parse_json((directory / _CARD_FILE).read_text(encoding="utf-8"))["sources"]
    except (OSError, ValueError, KeyError, TypeError):
        card = {}  # not written yet, or by another version
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


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One cell of the result table."""

    checkpoint: str
    suite: str
    decoding: str
    accuracy: float
    interval: tuple[float, float]

    @property
    def text(self) -> str:
        """In percent, with its interval."""
        return accuracy(Estimate(self.accuracy, *self.interval, "", 0)).plain


def read_accuracies(stages: Iterable[Path], names: Mapping[str, str] | None = None) -> list[Accuracy]:
    """The results in these stage directories, of a sweep those of each step; none in others.

    Also where another version has written more or less than this one would. `names`: what to call some checkpoints.
    """
    folders = [folder for stage in stages for folder in (stage, *sorted(stage.glob("step_*")))]
    files = (file for folder in folders if (file := folder / _RESULTS_FILE).is_file())
    found = [parse_json(file.read_text(encoding="utf-8")) for file in files]
    return [
        Accuracy(checkpoint, row["suite"], row["decoding"], row["accuracy"], tuple(row["interval"]))
        for results in found
        for checkpoint in [(names or {}).get(results["checkpoint"], results["checkpoint"])]
        for row in results["rows"]
    ]


def accuracy_table(cells: Sequence[Accuracy]) -> Table:
    """One row per suite and decoding, one column per checkpoint.

    Rows are sorted by decoding, then by suite, each in the order of the configuration.
    """
    checkpoints, decodings, suites = (
        list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("checkpoint", "decoding", "suite")
    )
    texts = {(cell.decoding, cell.suite, cell.checkpoint): cell.text for cell in cells}
    rows = (
        (suite, decoding, *(texts.get((decoding, suite, name), "-") for name in checkpoints))
        for decoding, suite in product(decodings, suites)
        if any((decoding, suite, name) in texts for name in checkpoints)
    )
    return table(("suite", "decoding", *checkpoints), rows)


def show_results(stages: Iterable[Path], page: Path | None = None, config: ExperimentConfig | None = None) -> None:
    """Print the accuracies in these stage directories, if there are any, and where the page is.

    `config`: that of their run, which may have names for its checkpoints.
    """
    if found := read_accuracies(stages, {} if config is None else config.checkpoint_names):
        show_table(accuracy_table(found), "Accuracy in % with its interval")
    if page is not None:
        say(f"report: {page}")


def write_pictures(record: RunRecord, folder: Path) -> list[Path]:
    """Write an SVG per training stage to `folder`, with the panels of the report; returns the files.

    Raises ConfigError where the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--svg {folder}: cannot be made ({error.strerror}); give another folder") from None
    config, files = record.configuration, []
    terms = config.objective.terms if config is not None and config.objective is not None else ()
    for node in nodes_showing("training_curves", record.stages):
        rows = read_metrics(record.stages[node].directory / METRICS_FILE)
        panels = rl_panels(terms) if node == "rl" else supervised_panels()
        if rows and (charts := panel_charts(panels, rows)):
            files.append(folder / f"{record.name}-{node}.svg")
            write_atomic(files[-1], picture(charts, columns=3))
    return files


def card_of(directory: Path) -> tuple[Table, list[str]]:
    """A row for each source, and notes on the data card of a finished `prepare_data`.

    They name no row of the data, only counts; the whole card is `card.md`.
    """
    card = parse_json((directory / _CARD_FILE).read_text(encoding="utf-8"))
    sources: Mapping[str, Mapping[str, Any]] = card["sources"]

    def counts(found: Mapping[str, int | str]) -> str:
        return ", ".join(f"{what} {count}" for what, count in found.items())

    rows, malformed, rejections, replays, references = [], [], [], [], list[str]()
    for name, source in sources.items():
        lengths, rejected = source["prompt_tokens"], sum(source["rejected"].values())
        tokens = f"{lengths['min']} to {lengths['max']}, median {lengths['p50']}" if lengths else "-"
        numbers = (source["rows_in"], source["rows_out"], rejected, source["folded"], source["quarantined"])
        rows.append([name, source["kind"], *map(str, numbers), str(source["traces_out"]), tokens])
        if source["quarantined"]:
            malformed.append(f"Malformed in {name}, by field: {counts(source['malformed'])}")
        if source["rejected"]:
            longest = {reason: f"{tokens} tokens" for reason, tokens in source.get("longest_rejected", {}).items()}
            up_to = f"; the longest: {counts(longest)}" if longest else ""
            rejections.append(f"Rejected of {name}: {counts(source['rejected'])}{up_to}")
        if source.get("replays"):
            replays.append(f"Traces of {name} played again in the environment: {counts(source['replays'])}")
        if source["gold_findings"]:
            golds = {finding.replace("_", " "): count for finding, count in source["golds"].items()}
            references.append(f"Reference answers of {name}: {counts(golds)}")
    malformed += [f"Each malformed row: {directory / 'quarantine.jsonl'}"] if malformed else []
    checked, missing = (", ".join(card["benchmarks"][key]) or "none" for key in ("checked", "not_checked"))
    last = f"Training data was checked against: {checked}; not available: {missing}"
    notes = [*malformed, *rejections, *replays, *references, last, f"The whole card: {directory / 'card.md'}"]
    return table(_CARD_HEADER, rows), notes

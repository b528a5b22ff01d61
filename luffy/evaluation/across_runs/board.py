"""The leaderboard: one table per protocol, one row per model, one column per suite, with clear leads marked.

A model is what its weights are: evaluations of equal weights by the same engine share a row, whichever stage or run
made them, and of two on the same problems by the same protocol the newer one counts.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import Field, PositiveInt, ValidationError, model_validator

from luffy.config import STAGE_KINDS
from luffy.config.evaluation import template_label
from luffy.config.fields import explain
from luffy.config.shipped import DATA
from luffy.config.strict import StrictModel
from luffy.config.yaml_source import read_yaml
from luffy.errors import ConfigError, DataError, LuffyError
from luffy.evaluation.across_runs.row_names import RowName, Use, leaves_of, name_row, read_uses, section, tell_apart
from luffy.evaluation.results import EvaluationResults, ResultRow, read_scores
from luffy.pipeline.graph import nodes_providing
from luffy.pipeline.manifest import MANIFEST_FILE, Manifest, read_manifest
from luffy.pipeline.workspace import Workspace
from luffy.statistics.accuracy import Estimate
from luffy.statistics.paired import BenchmarkComparison, PairedAccuracies, compare

_OF_SUITES = ("suites", "graders")
"""Fields of `evaluation` that are set by suite; they distinguish columns."""
_APART = (*_OF_SUITES, "only", "decodings", "confidence", "engine")
"""Fields of `evaluation` that differ between suites or decodings, or do not belong to the protocol."""
_WORDS = {"top_p": "top-p {}", "template": "{} prompt template"}
_OTHER_VERSION = "written by another version"
_OWN_TEMPLATE = "own"
_SYSTEM_PROMPT, _REMOVES = "system_prompt", "remove_system"
_NOT_SET = ("null", "[]", "{}")


Percent = Annotated[float, Field(ge=0.0, le=100.0)]


class PublishedBenchmark(StrictModel):
    """A column of a published table."""

    label: str
    problems: PositiveInt | None = None
    """Its number of problems; a suite with another number is a different benchmark. None: any number will do."""
    suites: tuple[str, ...] = Field(min_length=1)
    """Names that this benchmark may have among the suites of an experiment."""


class PublishedRow(StrictModel):
    """One model of a published table."""

    name: str
    accuracies: dict[str, Percent]


class PublishedTable(StrictModel):
    """A table of results from a paper, a file in `data/published/`: reference rows beside those of a workspace, without
    statistical tests, since their responses are not available."""

    title: str
    source: str
    """Its place in the paper, such as a table."""
    model: str
    """The model that all rows start from."""
    protocol: str
    """How they were evaluated, in words."""
    benchmarks: dict[str, PublishedBenchmark]
    rows: tuple[PublishedRow, ...]

    @model_validator(mode="after")
    def _rows_have_their_benchmarks(self) -> "PublishedTable":
        for row in self.rows:
            unknown = sorted(set(row.accuracies) - set(self.benchmarks))
            if unknown:
                raise ValueError(f"rows: {row.name} has {unknown[0]!r}, which is not among the benchmarks")
        return self

    def benchmark_of(self, suite: str, num_problems: int) -> str | None:
        """The table's benchmark that an evaluated suite is; None where it is none of them."""
        for name, benchmark in self.benchmarks.items():
            if suite in benchmark.suites and benchmark.problems in (None, num_problems):
                return name
        return None


def read_published(files: Sequence[Path] | None = None) -> tuple[PublishedTable, ...]:
    """The tables in `files`, by default those that ship with the project; ConfigError names file and field."""
    tables = []
    for path in sorted((DATA / "published").glob("*.yaml")) if files is None else files:
        values, origins = read_yaml(path)
        try:
            tables.append(PublishedTable.model_validate_json(json.dumps(values)))
        except ValidationError as error:
            raise ConfigError(explain(error, PublishedTable, origins, default_where=str(path))) from None
    return tuple(tables)


@dataclass(frozen=True, slots=True)
class EvaluationProtocol:
    """How responses were sampled and graded: only rows with equal protocols are compared."""

    decoding: str
    """Name of the decoding in the experiment; does not identify the protocol."""
    settings: Mapping[str, str]
    text: str
    """The protocol in words."""

    @property
    def key(self) -> str:
        """A key that is equal for equal protocols."""
        return json.dumps(sorted(self.settings.items()))


@dataclass(frozen=True, slots=True)
class Column:
    """A set of problems with a number of responses to each and a way to grade them."""

    suite: str
    num_problems: int
    num_samples: int
    """Responses per problem."""
    problems: str
    """Hash of the problems with their reference answers, and of what the experiment sets for this suite alone (its
    grader, its template)."""


Model = tuple[str, str, str]
"""Identity of a row: the digest of the weights, the engine and the dtype."""


@dataclass(frozen=True, slots=True)
class BoardCell:
    """One model's result on one suite under one protocol."""

    model: Model
    checkpoint: str
    """`base`, `sft` or `rl`."""
    step: int | None
    """Checkpoint of a sweep."""
    protocol: EvaluationProtocol
    column: Column
    row: ResultRow
    correct: Mapping[str, int]
    """Correct responses by problem."""
    evaluation: str
    """Key of the stage that found it."""
    ended: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A model under a protocol."""

    name: RowName
    model: str
    """Digest of its folder."""
    protocol: EvaluationProtocol
    cells: Mapping[Column, BoardCell]
    runs: tuple[str, ...]
    """Those that evaluated the model."""


LeftOut = dict[Path, str]
"""Directories of evaluations that no row shows, with the reason."""


def read_entries(workspace: Workspace) -> tuple[list[Entry], LeftOut]:
    """All models that the workspace has evaluated, and the evaluations that cannot be shown, with the reason.

    The newest evaluations come first. Raises DataError when there is none that can be shown.
    """
    left_out: LeftOut = {}
    stages = nodes_providing("evaluation", STAGE_KINDS)
    directories = [directory for stage in stages for directory in workspace.siblings(stage)]
    found = [cell for directory in directories for cell in _read_stage(workspace, directory, left_out)]
    if not found:
        reasons = "".join(f"; {directory.name}: {reason}" for directory, reason in left_out.items())
        raise DataError(
            f"workspace {workspace.root}: no finished evaluation{reasons}; run a chain that has the stage evaluate"
        )
    found.sort(key=lambda cell: cell.ended, reverse=True)  # stable: the order of suites within one stays
    return _entries(found, read_uses(workspace)), left_out


def _read_stage(workspace: Workspace, directory: Path, left_out: LeftOut) -> list[BoardCell]:
    """The results of the evaluation in `directory`; none, and an entry in `left_out`, when it does not count."""
    manifest = read_manifest(directory)
    if manifest is None:
        reason = _OTHER_VERSION if (directory / MANIFEST_FILE).exists() else "not finished"
    elif damaged := manifest.damaged(directory):
        path, complaint = next(iter(damaged.items()))
        reason = f"{path} is {complaint}"
    else:
        try:
            if manifest.stage == "sweep":
                return list(_read_sweep(workspace, directory, manifest))
            return list(_read(directory, manifest, _settings(workspace, manifest), manifest.consumed["model"]))
        except (LuffyError, KeyError, TypeError, ValueError):  # what readers of another version's files raise
            reason = _OTHER_VERSION
    left_out[directory] = reason
    return []


def _read_sweep(workspace: Workspace, directory: Path, manifest: Manifest) -> Iterator[BoardCell]:
    """Each of its steps; the one whose weights are the run's model has the digest of that, so that both share a row."""
    rl, final = read_manifest(workspace.stage_directory("rl", manifest.upstream["model"])), None
    if rl is not None and section(section(rl.settings, "validation"), "schedule").get("keep_best") is None:
        final = section(rl.settings, "rl").get("steps")  # else the model may be any of several steps
    settings = _settings(workspace, manifest)
    for folder in sorted(directory.glob("step_*")):
        step, model = int(folder.name.removeprefix("step_")), manifest.consumed["model"]
        yield from _read(folder, manifest, settings, model if step == final else f"{model}@{step}", step)


def _settings(workspace: Workspace, manifest: Manifest) -> Mapping[str, object]:
    """Settings of `evaluate`, which are nested in those of a sweep, with the system prompt of the data."""
    own = section(manifest.settings, "protocol") if manifest.stage == "sweep" else manifest.settings
    data = read_manifest(workspace.stage_directory("prepare_data", manifest.upstream.get("data", "")))
    prepared = {} if data is None else section(data.settings, "data")
    return {**own, _SYSTEM_PROMPT: prepared.get(_SYSTEM_PROMPT), _REMOVES: prepared.get(_REMOVES, False)}


def _read(
    directory: Path, manifest: Manifest, settings: Mapping[str, object], model: str, step: int | None = None
) -> Iterator[BoardCell]:
    scores = read_scores(directory)
    results = scores.results
    for row in results.rows:
        on = row.suite, row.decoding
        problems = _problems(settings, row.suite, scores.references[on])
        yield BoardCell(
            model=(model, str(section(settings, "evaluation").get("engine")), str(settings.get("dtype"))),
            checkpoint=results.checkpoint if step is None else "rl",
            step=step,
            protocol=_protocol(settings, results, row.decoding),
            column=Column(row.suite, row.num_problems, row.num_samples, problems),
            row=row,
            correct=scores.correct[on],
            evaluation=manifest.key,
            ended=manifest.ended,
        )


def _entries(found: Iterable[BoardCell], uses: Mapping[str, Sequence[Use]]) -> list[Entry]:
    """A row for each model and protocol; `found` has the newest first."""
    rows: dict[tuple[Model, str], list[BoardCell]] = {}
    of_models: dict[Model, list[BoardCell]] = {}
    for cell in found:
        rows.setdefault((cell.model, cell.protocol.key), []).append(cell)
        of_models.setdefault(cell.model, []).append(cell)

    def uses_of(cells: Iterable[BoardCell]) -> list[Use]:
        keys = dict.fromkeys(cell.evaluation for cell in cells)
        return [use for key in reversed(keys) for use in uses.get(key, ())]

    # One name per model, independent of the protocols of its evaluations.
    used = [uses_of(cells) for cells in of_models.values()]
    newest = [cells[0] for cells in of_models.values()]
    names = [name_row(of_model, cell.checkpoint, cell.step) for of_model, cell in zip(used, newest, strict=True)]
    fallback = [", ".join(filter(None, (engine, dtype, digest[:8]))) for digest, engine, dtype in of_models]
    name_of = dict(zip(of_models, tell_apart(names, used, fallback), strict=True))
    entries = []
    for (model, _), cells in rows.items():
        columns: dict[Column, BoardCell] = {}
        for cell in cells:
            columns.setdefault(cell.column, cell)
        runs = tuple(dict.fromkeys(use.record.name for use in uses_of(cells)))
        entries.append(Entry(name_of[model], model[0], cells[0].protocol, columns, runs))
    return entries


def _protocol(of_stage: Mapping[str, object], results: EvaluationResults, decoding: str) -> EvaluationProtocol:
    evaluation = section(of_stage, "evaluation")
    sampling = section(section(evaluation, "decodings"), decoding)
    shared = {name: value for name, value in evaluation.items() if name not in _APART}
    settings = leaves_of(sampling) | leaves_of(shared)
    grading = {f"grading.{name}": value for name, value in leaves_of(of_stage.get("grading")).items()}
    if evaluation.get("template", _OWN_TEMPLATE) == _OWN_TEMPLATE:  # the other templates have their own system message
        grading[f"data.{_SYSTEM_PROMPT}"] = json.dumps(of_stage.get(_SYSTEM_PROMPT))
        grading[f"data.{_REMOVES}"] = json.dumps(of_stage.get(_REMOVES, False))
    text = _in_words(settings)
    return EvaluationProtocol(decoding, settings | grading | {"confidence": str(results.confidence)}, text)


def _in_words(settings: Mapping[str, str]) -> str:
    """The protocol for a reader, without the number of responses, which columns name."""
    left = {name: value for name, value in settings.items() if value not in _NOT_SET and name != "num_samples"}
    if not left:
        return "sampled elsewhere"
    temperature = float(left.pop("temperature"))
    if float(left.get("top_p", 1)) == 1:
        left.pop("top_p", None)
    words = ["greedy decoding" if temperature == 0 else f"temperature {temperature:g}"]
    if "max_response_tokens" in left:
        words.append(f"up to {int(left.pop('max_response_tokens')):,} tokens a response")
    if "template" in left:
        left["template"] = template_label(left["template"])
    words += [form.format(left.pop(name)) for name, form in _WORDS.items() if name in left]
    return ", ".join([*words, *(f"{name} {value}" for name, value in left.items())])


def _problems(settings: Mapping[str, object], suite: str, references: Mapping[str, str]) -> str:
    evaluation = section(settings, "evaluation")
    own = [section(evaluation, name).get(suite) for name in _OF_SUITES]
    content = json.dumps([sorted(references.items()), [each for each in own if each is not None]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class Lead:
    """The best row of a column against the next one, on the same problems."""

    best: Entry
    next: Entry
    comparison: BenchmarkComparison
    """The best against the next, with Holm's correction over the columns that have two rows."""

    @property
    def is_clear(self) -> bool:
        return self.comparison.is_significant


@dataclass(frozen=True, slots=True)
class Reference:
    """A published row beside a table, with those of its benchmarks that are columns of the table."""

    table: PublishedTable
    row: PublishedRow
    accuracies: Mapping[Column, float]
    """In [0, 1]."""


@dataclass(frozen=True, slots=True)
class BoardTable:
    """All models under one protocol."""

    protocol: EvaluationProtocol
    confidence: float
    columns: tuple[Column, ...]
    rows: tuple[Entry, ...]
    """Rows, the best mean first."""
    leads: Mapping[Column, Lead]
    """For the columns that at least two rows share."""
    references: tuple[Reference, ...]
    note: str = ""
    """Settings that distinguish it from other tables whose protocol reads the same."""

    def mean(self, entry: Entry) -> Estimate | None:
        """The unweighted mean over all columns with its interval; None unless the row has every column.

        The suites are independent samples, so the interval recovers each one's variance from its own interval
        (MOVER: G. Y. Zou and A. Donner, Stat. Med. 27 (2008), eq. 3), and keeps their asymmetry.
        """
        if len(self.columns) < 2 or any(column not in entry.cells for column in self.columns):
            return None
        rows = [entry.cells[column].row for column in self.columns]
        value, n = fmean(row.accuracy for row in rows), len(rows)
        below = math.sqrt(sum((row.accuracy - row.interval[0]) ** 2 for row in rows)) / n
        above = math.sqrt(sum((row.interval[1] - row.accuracy) ** 2 for row in rows)) / n
        return Estimate(value, value - below, value + above, "MOVER", sum(row.num_problems for row in rows))


@dataclass(frozen=True, slots=True)
class Board:
    """Everything the leaderboard shows."""

    tables: tuple[BoardTable, ...]
    published: tuple[PublishedTable, ...]
    left_out: LeftOut


def read_board(workspace: Workspace) -> Board:
    """The leaderboard of a workspace, with the published rows whose benchmarks are among its suites.

    Raises DataError when there is no evaluation that can be shown.
    """
    (entries, left_out), published, groups = read_entries(workspace), read_published(), dict[str, list[Entry]]()
    for entry in entries:
        groups.setdefault(entry.protocol.key, []).append(entry)
    tables = [_table(group, published) for group in groups.values()]
    return Board(tuple(_with_notes(tables)), published, left_out)


def board_json(board: Board) -> str:
    """All tables with every number unrounded, accuracies in [0, 1], for programs: what `leaderboard.json` holds."""
    content = {
        "tables": [
            {
                "protocol": dict(table.protocol.settings),
                "decoding": table.protocol.decoding,
                "confidence": table.confidence,
                "columns": [asdict(column) for column in table.columns],
                "rows": [_row_values(table, entry) for entry in table.rows],
                "published": [
                    {
                        "name": each.row.name,
                        **{name: getattr(each.table, name) for name in ("title", "source", "model", "protocol")},
                        "accuracies": [each.accuracies.get(column) for column in table.columns],
                    }
                    for each in table.references
                ],
            }
            for table in board.tables
        ],
        "left_out": [{"directory": str(path), "reason": reason} for path, reason in board.left_out.items()],
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _table(entries: Sequence[Entry], published: Sequence[PublishedTable]) -> BoardTable:
    columns = tuple(dict.fromkeys(column for entry in entries for column in entry.cells))
    shared = [column for column in columns if all(column in entry.cells for entry in entries)]
    confidence = float(entries[0].protocol.settings["confidence"])

    def own_mean(entry: Entry) -> float:
        """Over the columns that all rows have; without common columns, over its own."""
        return fmean(entry.cells[column].row.accuracy for column in shared or entry.cells)

    references = []
    for table in published:
        benchmarks = {column: table.benchmark_of(column.suite, column.num_problems) for column in columns}
        for row in table.rows:
            of = row.accuracies
            if found := {column: of[name] / 100 for column, name in benchmarks.items() if name in of}:
                references.append(Reference(table, row, found))
    return BoardTable(
        protocol=entries[0].protocol,
        confidence=confidence,
        columns=columns,
        rows=tuple(sorted(entries, key=own_mean, reverse=True)),
        leads=_leads(entries, columns, confidence),
        references=tuple(references),
    )


def _leads(entries: Sequence[Entry], columns: Sequence[Column], confidence: float) -> dict[Column, Lead]:
    """The best row against the next in each column with at least two rows, at `confidence` for all columns jointly."""
    leading: dict[Column, tuple[Entry, Entry]] = {}
    pairs: dict[str, PairedAccuracies] = {}
    for column in columns:
        having = [entry for entry in entries if column in entry.cells]
        having.sort(key=lambda entry: -entry.cells[column].row.accuracy)
        if len(having) > 1:
            best, following = (entry.cells[column].correct for entry in having[:2])
            before, after = ([of[uid] / column.num_samples for uid in following] for of in (following, best))
            leading[column] = having[0], having[1]
            pairs[str(column)] = PairedAccuracies(before, after, column.num_samples)
    compared = compare(pairs, confidence)
    return {column: Lead(*two, compared.on(str(column))) for column, two in leading.items()}


def _with_notes(tables: Sequence[BoardTable]) -> list[BoardTable]:
    """Each table with the settings that differ between it and others whose protocol reads the same."""
    noted = []
    for table in tables:
        alike = [other for other in tables if other.protocol.text == table.protocol.text]
        names = dict.fromkeys(name for other in alike for name in other.protocol.settings)
        differing = [name for name in names if len({other.protocol.settings.get(name) for other in alike}) > 1]
        own = table.protocol.settings
        noted.append(replace(table, note=", ".join(f"{name}: {own.get(name, 'not set')}" for name in differing)))
    return noted


def _row_values(table: BoardTable, entry: Entry) -> dict[str, object]:
    """A row with its cells in the order of the columns, null where the model was not evaluated."""
    mean, cells = table.mean(entry), list[dict[str, object] | None]()
    for column in table.columns:
        cell, lead, found = entry.cells.get(column), table.leads.get(column), None
        if cell is None:
            cells.append(None)
            continue
        if lead is not None and lead.best is entry:
            paired = lead.comparison.paired
            found = {
                "over": lead.next.name.text,
                "difference": paired.difference.value,
                "interval": paired.difference.interval,
                **{name: getattr(paired, name) for name in ("wins", "ties", "losses")},
                "p": paired.p_value,
                "adjusted_p": lead.comparison.adjusted_p,
                "is_clear": lead.is_clear,
            }
        own = {name: getattr(cell.row, name) for name in ("accuracy", "interval", "method")}
        cells.append({**own, "evaluation": cell.evaluation, "lead": found})
    return {
        **asdict(entry.name),
        "model": entry.model,
        "runs": entry.runs,
        "mean": None if mean is None else {"accuracy": mean.value, "interval": mean.interval},
        "cells": cells,
    }

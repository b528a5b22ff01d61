"""All evaluations of a workspace, as DataFrames (`luffy.load_results`) and as the leaderboard.

The leaderboard has a table for each protocol, a row for each model, and a column for each suite, with clear leads
marked. A model is what its weights are: evaluations of equal weights by the same engine share a row, whichever stage or
run made them, and of two on the same problems by the same protocol the newer one counts.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, cast

from luffy.config import STAGE_KINDS
from luffy.config.chain import by_name
from luffy.config.evaluation import template_label
from luffy.config.model import model_name
from luffy.errors import DataError, LuffyError
from luffy.evaluation.results import EvaluationResults, ResultRow, checkpoint_name, read_scores
from luffy.pipeline.graph import providing
from luffy.pipeline.identity import Json
from luffy.pipeline.manifest import MANIFEST_FILE, Manifest, read_manifest
from luffy.pipeline.plan import flatten
from luffy.pipeline.records import RunRecord, list_records
from luffy.pipeline.workspace import Workspace, find_workspace
from luffy.statistics.accuracy import Estimate
from luffy.statistics.paired import BenchmarkComparison, PairedAccuracies, compare

if TYPE_CHECKING:
    import pandas as pd

_OF_SUITES = ("suites", "graders")
"""Fields of `evaluation` that are set by suite; they distinguish columns."""
_APART = (*_OF_SUITES, "only", "decodings", "confidence", "engine")
"""Fields of `evaluation` that differ between suites or decodings, or do not belong to the protocol."""
_OTHER_VERSION = "written by another version"
_OWN_TEMPLATE = "own"
_SYSTEM_PROMPT, _REMOVES = "system_prompt", "remove_system"
_NOT_SAMPLING = ("grading.", "data.", "confidence", "num_samples")
"""Beginnings of settings of a protocol that the title of a table does not name."""
_NOT_SET = ("null", "[]", "{}")
_MEASURES = ("num_problems", "num_samples", "accuracy", "mean_tokens", "truncated_share", "no_answer_share")


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


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model as the runs call it that evaluated it."""

    identity: tuple[str, str, str]
    """Digest of the weights, engine, dtype."""
    runs: tuple[str, ...]
    """Names of the runs, the oldest first; empty where none is left."""
    experiment: str
    """Experiments of these runs."""
    method: str
    """Method of the last stage that trains; empty before that stage."""
    checkpoint: str

    @property
    def run(self) -> str:
        """The newest run; where none is left, what else identifies the model."""
        digest, *sampled_by = self.identity
        return self.runs[-1] if self.runs else ", ".join((digest[:8], *sampled_by))

    @property
    def text(self) -> str:
        """The name in one line."""
        return " · ".join(filter(None, (self.run, self.method, self.checkpoint)))


@dataclass(frozen=True, slots=True)
class Result:
    """What one evaluation found of a model on one suite under one protocol."""

    identity: tuple[str, str, str]
    """What `NamedModel` has under this name."""
    checkpoint: str
    """`base`, `sft` or `rl`."""
    step: int | None
    """Checkpoint of a sweep."""
    decoding: str
    """Its name in the experiment; does not identify the protocol."""
    protocol: Mapping[str, str]
    """How responses were sampled and graded: only rows with equal protocols are compared."""
    column: Column
    row: ResultRow
    correct: Mapping[str, int]
    """Correct responses by problem."""
    evaluation: str
    """Key of the stage that found it."""
    ended: str


@dataclass(frozen=True, slots=True)
class ModelResults:
    """A row of the leaderboard: a model under one protocol."""

    model: NamedModel
    decoding: str
    protocol: Mapping[str, str]
    cells: Mapping[Column, Result]


LeftOut = dict[Path, str]
"""Directories of evaluations that no row shows, with the reason."""


def read_all(workspace: Workspace) -> tuple[list[ModelResults], LeftOut]:
    """All models that the workspace has evaluated, and the evaluations that cannot be shown, with the reason.

    The newest evaluations come first. Raises DataError when there is none that can be shown.
    """
    left_out: LeftOut = {}
    stages = [kind.name for kind in STAGE_KINDS.values() if "evaluation" in kind.provides]
    directories = [directory for stage in stages for directory in workspace.siblings(stage)]
    found = [result for directory in directories for result in _read_stage(workspace, directory, left_out)]
    if not found:
        reasons = "".join(f"; {directory.name}: {reason}" for directory, reason in left_out.items())
        raise DataError(
            f"workspace {workspace.root}: no finished evaluation{reasons}; run a chain that has the stage evaluate"
        )
    found.sort(key=lambda result: result.ended, reverse=True)  # stable: the order of suites within one stays
    rows: dict[tuple[object, ...], dict[Column, Result]] = {}
    of_models: dict[tuple[str, str, str], list[Result]] = {}
    for result in found:
        cells = rows.setdefault((result.identity, *sorted(result.protocol.items())), {})
        cells.setdefault(result.column, result)
        of_models.setdefault(result.identity, []).append(result)
    uses = _read_uses(workspace)
    models = {identity: _named(results, uses) for identity, results in of_models.items()}
    together = []
    for cells in rows.values():
        newest = next(iter(cells.values()))
        together.append(ModelResults(models[newest.identity], newest.decoding, newest.protocol, cells))
    return together, left_out


def _read_stage(workspace: Workspace, directory: Path, left_out: LeftOut) -> list[Result]:
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


def _read_sweep(workspace: Workspace, directory: Path, manifest: Manifest) -> Iterator[Result]:
    """Each of its steps; the one whose weights are the run's model has the digest of that, so that both share a row."""
    rl, final = read_manifest(workspace.stage_directory("rl", manifest.upstream["model"])), None
    if rl is not None and _section(_section(rl.settings, "validation"), "schedule").get("keep_best") is None:
        final = _section(rl.settings, "rl").get("steps")  # else the model may be any of several steps
    settings = _settings(workspace, manifest)
    for folder in sorted(directory.glob("step_*")):
        step, model = int(folder.name.removeprefix("step_")), manifest.consumed["model"]
        yield from _read(folder, manifest, settings, model if step == final else f"{model}@{step}", step)


def _settings(workspace: Workspace, manifest: Manifest) -> Mapping[str, object]:
    """Settings of `evaluate`, which are nested in those of a sweep, with the system prompt of the data."""
    own = _section(manifest.settings, "protocol") if manifest.stage == "sweep" else manifest.settings
    data = read_manifest(workspace.stage_directory("prepare_data", manifest.upstream.get("data", "")))
    prepared = {} if data is None else _section(data.settings, "data")
    return {**own, _SYSTEM_PROMPT: prepared.get(_SYSTEM_PROMPT), _REMOVES: prepared.get(_REMOVES, False)}


def _read(
    directory: Path, manifest: Manifest, settings: Mapping[str, object], model: str, step: int | None = None
) -> Iterator[Result]:
    scores, evaluation = read_scores(directory), _section(settings, "evaluation")
    for row in scores.results.rows:
        on = row.suite, row.decoding
        own = [each for name in _OF_SUITES if (each := _section(evaluation, name).get(row.suite)) is not None]
        content = json.dumps([sorted(scores.references[on].items()), own], sort_keys=True)
        problems = hashlib.sha256(content.encode()).hexdigest()[:8]
        yield Result(
            identity=(model, str(evaluation.get("engine")), str(settings.get("dtype"))),
            checkpoint=scores.checkpoint if step is None else "rl",
            step=step,
            decoding=row.decoding,
            protocol=_protocol(settings, scores.results, row.decoding),
            column=Column(row.suite, row.num_problems, row.num_samples, problems),
            row=row,
            correct=scores.correct[on],
            evaluation=manifest.key,
            ended=manifest.ended,
        )


def _protocol(of_stage: Mapping[str, object], results: EvaluationResults, decoding: str) -> dict[str, str]:
    evaluation = _section(of_stage, "evaluation")
    shared = {name: value for name, value in evaluation.items() if name not in _APART}
    settings = _leaves(_section(_section(evaluation, "decodings"), decoding)) | _leaves(shared)
    settings |= {f"grading.{name}": value for name, value in _leaves(of_stage.get("grading")).items()}
    if evaluation.get("template", _OWN_TEMPLATE) == _OWN_TEMPLATE:  # the other templates have their own system message
        settings[f"data.{_SYSTEM_PROMPT}"] = json.dumps(of_stage.get(_SYSTEM_PROMPT))
        settings[f"data.{_REMOVES}"] = json.dumps(of_stage.get(_REMOVES, False))
    return settings | {"confidence": str(results.confidence)}


def _section(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    """The mapping under that name; empty where there is none."""
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}


def _leaves(values: object) -> dict[str, str]:
    """The leaves of what a JSON file holds, `kind.boxed` to their text."""
    leaves = ((name, value) for name, value in flatten(cast(Json, values)) if value != {})
    return {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for name, value in leaves}


def _read_uses(workspace: Workspace) -> dict[str, list[tuple[RunRecord, str]]]:
    """Key of an evaluation to the runs that used it, with the node, the oldest first."""
    uses: dict[str, list[tuple[RunRecord, str]]] = {}
    for record in sorted(list_records(workspace), key=lambda record: (str(record.started), record.name)):
        for node in providing("evaluation", record.kinds):
            uses.setdefault(record.stages[node].key, []).append((record, node))
    return uses


def _named(results: Sequence[Result], uses: Mapping[str, Sequence[tuple[RunRecord, str]]]) -> NamedModel:
    """The model of these results, the newest of which come first."""
    newest, method = results[0], ""
    checkpoint, step = newest.checkpoint, newest.step
    keys = dict.fromkeys(result.evaluation for result in results)
    used = [use for key in reversed(keys) for use in uses.get(key, ())]
    # Without a configuration where responses were sampled elsewhere.
    config: Mapping[str, object] = used[-1][0].config if used else {}
    if config:
        node, stages = used[-1][1], by_name(config.get("stages"))
        kinds = {name: str(entry["kind"]) for name, entry in stages.items()} if isinstance(stages, dict) else {}
        _, *trained = providing("policy", kinds) or [""]
        checkpoint = (trained or ["rl"])[-1] if node == "sweep" else node.removeprefix("evaluate_")
        if trained[-1:] == [checkpoint]:
            own = stages[checkpoint] if isinstance(stages, dict) else {}
            method = str(
                own.get("method")
                or config.get("method")
                or ("own objective" if own.get("objective") or config.get("objective") else "")
            )
    if checkpoint == "rl" and step is None:
        step = cast("int | None", _section(config, "rl").get("steps"))
    shown = (checkpoint == "base" and model_name(_section(config, "model"))) or checkpoint_name(checkpoint)
    experiments = dict.fromkeys(record.experiment or record.name for record, _ in used)
    return NamedModel(
        identity=newest.identity,
        runs=tuple(dict.fromkeys(record.name for record, _ in used)),
        experiment=", ".join(experiments),
        method=method,
        checkpoint=shown if step is None else f"{shown} step {step}",
    )


@dataclass(frozen=True, slots=True)
class Lead:
    """The best row of a column against the next one, on the same problems."""

    best: ModelResults
    next: ModelResults
    comparison: BenchmarkComparison
    """The best against the next, with Holm's correction over the columns that have two rows."""


@dataclass(frozen=True, slots=True)
class ProtocolTable:
    """All models under one protocol."""

    title: str
    """The decoding, and how it samples."""
    protocol: Mapping[str, str]
    columns: tuple[Column, ...]
    rows: tuple[ModelResults, ...]
    """The best mean first."""
    leads: Mapping[Column, Lead]
    """For the columns that at least two rows share."""
    note: str = ""
    """Settings that distinguish it from other tables with the same title."""

    @property
    def confidence(self) -> float:
        return float(self.protocol["confidence"])

    def mean(self, row: ModelResults) -> Estimate | None:
        """The unweighted mean over all columns with its interval; None unless the row has every column.

        The suites are independent samples, so the interval recovers each one's variance from its own interval
        (MOVER: G. Y. Zou and A. Donner, Stat. Med. 27 (2008), eq. 3), and keeps their asymmetry.
        """
        if len(self.columns) < 2 or any(column not in row.cells for column in self.columns):
            return None
        found = [row.cells[column].row for column in self.columns]
        value, n = fmean(each.accuracy for each in found), len(found)
        below = math.sqrt(sum((each.accuracy - each.interval[0]) ** 2 for each in found)) / n
        above = math.sqrt(sum((each.interval[1] - each.accuracy) ** 2 for each in found)) / n
        return Estimate(value, value - below, value + above, "MOVER", sum(each.num_problems for each in found))


@dataclass(frozen=True, slots=True)
class Leaderboard:
    """Everything the leaderboard shows."""

    tables: tuple[ProtocolTable, ...]
    left_out: LeftOut


def read_leaderboard(workspace: Workspace) -> Leaderboard:
    """The leaderboard of a workspace; DataError when there is no evaluation that can be shown."""
    found, left_out = read_all(workspace)
    groups: dict[frozenset[tuple[str, str]], list[ModelResults]] = {}
    for row in found:
        groups.setdefault(frozenset(row.protocol.items()), []).append(row)
    tables = [_table(rows) for rows in groups.values()]
    noted = []
    for table in tables:
        protocols = [other.protocol for other in tables if other.title == table.title]
        names = dict.fromkeys(name for protocol in protocols for name in protocol)
        differing = [name for name in names if len({protocol.get(name) for protocol in protocols}) > 1]
        note = ", ".join(f"{name}: {table.protocol.get(name, 'not set')}" for name in differing)
        noted.append(replace(table, note=note))
    return Leaderboard(tuple(noted), left_out)


def _table(rows: Sequence[ModelResults]) -> ProtocolTable:
    decoding, protocol = rows[0].decoding, rows[0].protocol
    columns = tuple(dict.fromkeys(column for row in rows for column in row.cells))
    shared = [column for column in columns if all(column in row.cells for row in rows)]

    def own_mean(row: ModelResults) -> float:
        """Over the columns that all rows have; without common columns, over its own."""
        return fmean(row.cells[column].row.accuracy for column in shared or row.cells)

    sampling = [
        f"{name} {template_label(value) if name == 'template' else value}"
        for name, value in protocol.items()
        if value not in _NOT_SET and not name.startswith(_NOT_SAMPLING)
    ]
    return ProtocolTable(
        title=": ".join(filter(None, (decoding, ", ".join(sampling)))),
        protocol=protocol,
        columns=columns,
        rows=tuple(sorted(rows, key=own_mean, reverse=True)),
        leads=_leads(rows, columns, float(protocol["confidence"])),
    )


def _leads(rows: Sequence[ModelResults], columns: Sequence[Column], confidence: float) -> dict[Column, Lead]:
    """The best row against the next in each column with at least two rows, at `confidence` for all columns jointly."""
    leading: dict[Column, tuple[ModelResults, ModelResults]] = {}
    pairs: dict[str, PairedAccuracies] = {}
    for column in columns:
        having = [row for row in rows if column in row.cells]
        having.sort(key=lambda row: -row.cells[column].row.accuracy)
        if len(having) > 1:
            best, following = (row.cells[column].correct for row in having[:2])
            before, after = ([of[uid] / column.num_samples for uid in following] for of in (following, best))
            leading[column] = having[0], having[1]
            pairs[str(column)] = PairedAccuracies(before, after, column.num_samples)
    compared = compare(pairs, confidence)
    return {column: Lead(*two, compared.on(str(column))) for column, two in leading.items()}


def load_results(workspace: str | Path | None = None) -> "pd.DataFrame":
    """Every finished evaluation: one row per model, protocol and suite, the newest evaluations first.

    `workspace` is found as by the command line when left out. Raises DataError where nothing was evaluated. Columns:

    - `experiment`, `method`, `checkpoint`: what made the model; `runs`: the names of the runs that evaluated it, the
      oldest first (`luffy.load_runs` has their settings); `model`: digest of its weights (evaluations of equal weights
      share a row)
    - `suite`, `decoding`, `temperature`, `top_p`, `max_response_tokens`, `template`: what was evaluated, and how
      (unknown numbers are missing)
    - `num_problems`, `num_samples` (responses per problem)
    - `accuracy`, `low`, `high` in [0, 1], `confidence`, `interval_method`
    - `pass_at_k`, `maj_at_k`: for the largest k sampled (`num_samples`); missing with one response per problem
    - `mean_tokens`, `truncated_share`, `no_answer_share`: of the responses
    - `evaluation`: key of the stage; `ended`: when it ended (UTC)
    """
    import pandas as pd  # loads for half a second

    def setting(result: Result, name: str, default: float = math.nan) -> float:
        return float(result.protocol.get(name, default))  # unknown where the responses were sampled elsewhere

    rows = [
        {
            **_names(model, column),
            **{name: setting(result, name) for name in ("temperature", "max_response_tokens")},
            "top_p": setting(result, "top_p", 1.0),
            "template": result.protocol.get("template", _OWN_TEMPLATE),
            "low": result.row.interval[0],
            "high": result.row.interval[1],
            "confidence": setting(result, "confidence"),
            "interval_method": result.row.method,
            "pass_at_k": result.row.pass_at_k.get(str(column.num_samples)),
            "maj_at_k": result.row.maj_at_k.get(str(column.num_samples)),
            **{name: getattr(result.row, name) for name in _MEASURES},
            "evaluation": result.evaluation,
            "ended": result.ended,
        }
        for model in read_all(find_workspace(workspace))[0]
        for column, result in model.cells.items()
    ]
    frame = pd.DataFrame(rows)
    frame["ended"] = pd.to_datetime(frame["ended"], utc=True)
    return frame


def load_problem_results(workspace: str | Path | None = None) -> "pd.DataFrame":
    """As `load_results`, but one row per problem, for statistics of one's own.

    Columns: `experiment`, `method`, `checkpoint`, `runs`, `model`, `suite`, `decoding`, `uid` (of the problem),
    `correct` and `num_samples` (responses), `evaluation` (key of the stage). No text of a problem or a response.
    """
    import pandas as pd  # as above

    return pd.DataFrame(
        {
            **_names(model, column),
            "uid": uid,
            "correct": correct,
            "num_samples": column.num_samples,
            "evaluation": result.evaluation,
        }
        for model in read_all(find_workspace(workspace))[0]
        for column, result in model.cells.items()
        for uid, correct in result.correct.items()
    )


def _names(found: ModelResults, column: Column) -> dict[str, object]:
    model = found.model
    names = {name: getattr(model, name) for name in ("experiment", "method", "checkpoint", "runs")}
    return {**names, "model": model.identity[0], "suite": column.suite, "decoding": found.decoding}

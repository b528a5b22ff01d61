"""The finished evaluations of a workspace: each model under each protocol, once.

A model is what its weights are: evaluations of equal weights by the same engine share a row, whichever stage or run
made them, and of two on the same problems by the same protocol the newer one counts.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from luffy.config import STAGE_KINDS
from luffy.config.evaluation import template_label
from luffy.errors import LuffyError
from luffy.evaluation.leaderboard.row_names import RowName, Use, flatten, name_row, read_uses, tell_apart
from luffy.evaluation.results import RESULTS_FILE, Cell, EvaluationResults, ResultRow, read_results
from luffy.evaluation.sample_files import read_samples_of
from luffy.pipeline.graph import nodes_providing
from luffy.pipeline.manifest import MANIFEST_FILE, Manifest, read_manifest
from luffy.pipeline.workspace import Workspace

_OF_SUITES = ("suites", "graders")
"""Fields of `evaluation` that are set by suite; they distinguish columns."""
_APART = (*_OF_SUITES, "only", "decodings", "confidence", "engine")
"""Fields of `evaluation` that differ between suites or decodings, or do not belong to the protocol."""
_WORDS = {"top_p": "top-p {}", "template": "{} prompt template"}
_OTHER_VERSION = "written by another version"
_OWN_TEMPLATE = "own"
_SYSTEM_PROMPT = "system_prompt"
_NOT_SET = ("null", "[]", "{}")


@dataclass(frozen=True, slots=True)
class EvaluationProtocol:
    """How responses were sampled and graded: only rows with equal protocols are compared."""

    decoding: str
    """Name of the decoding in the experiment; does not identify the protocol."""
    settings: Mapping[str, str]
    """All settings that identify the protocol."""
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


@dataclass(frozen=True, slots=True)
class BoardCell:
    """One model's result in a column."""

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
    """Names of the runs that evaluated the model."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An evaluation that no row shows."""

    directory: Path
    reason: str


_Model = tuple[str, str, str]
"""Identity of a row: the digest of the weights, the engine and the dtype."""


@dataclass(frozen=True, slots=True)
class _Found:
    """One checkpoint's results on one suite under one decoding."""

    model: _Model
    checkpoint: str
    """`base`, `sft` or `rl`."""
    step: int | None
    """Checkpoint of a sweep."""
    protocol: EvaluationProtocol
    column: Column
    cell: BoardCell


def read_entries(workspace: Workspace) -> tuple[list[Entry], list[LeftOut]]:
    """All models that the workspace has evaluated, and the evaluations that cannot be shown, with the reason.

    The newest evaluations come first.
    """
    left_out: list[LeftOut] = []
    stages = nodes_providing("evaluation", STAGE_KINDS)
    directories = [directory for stage in stages for directory in workspace.siblings(stage)]
    found = [item for directory in directories for item in _read_stage(workspace, directory, left_out)]
    found.sort(key=lambda item: item.cell.ended, reverse=True)  # stable: the order of suites within one stays
    return _entries(found, read_uses(workspace)), left_out


def _read_stage(workspace: Workspace, directory: Path, left_out: list[LeftOut]) -> list[_Found]:
    """The results of the evaluation in `directory`; none, and an entry in `left_out`, when it does not count."""
    manifest = read_manifest(directory)
    reason = _doubt(directory, manifest)
    try:
        if manifest is not None and not reason:
            if manifest.stage == "sweep":
                return list(_read_sweep(workspace, directory, manifest))
            return list(_read(directory, manifest, _settings(workspace, manifest), manifest.consumed["model"]))
    except (LuffyError, KeyError, TypeError, ValueError):  # what readers of another version's files raise
        reason = _OTHER_VERSION
    left_out.append(LeftOut(directory, reason))
    return []


def _doubt(directory: Path, manifest: Manifest | None) -> str:
    """Why the results in a directory do not count; empty when they do."""
    if manifest is None:
        return _OTHER_VERSION if (directory / MANIFEST_FILE).exists() else "not finished"
    damaged = manifest.damaged(directory)
    return "".join(f"{path} is {complaint}" for path, complaint in list(damaged.items())[:1])


def _read_sweep(workspace: Workspace, directory: Path, manifest: Manifest) -> Iterator[_Found]:
    """Each of its steps; the one whose weights are the run's model has the digest of that, so that both share a row."""
    final = _final_step(read_manifest(workspace.stage_directory("rl", manifest.upstream["model"])))
    settings = _settings(workspace, manifest)
    for folder in sorted(directory.glob("step_*")):
        step, model = int(folder.name.removeprefix("step_")), manifest.consumed["model"]
        yield from _read(folder, manifest, settings, model if step == final else f"{model}@{step}", step)


def _final_step(rl: Manifest | None) -> object:
    """The step whose weights are the model of an RL stage; None where that is unknown, or the best of several."""
    if rl is None or _mapping(_mapping(rl.settings, "validation"), "schedule").get("keep_best") is not None:
        return None
    return _mapping(rl.settings, "rl").get("steps")


def _settings(workspace: Workspace, manifest: Manifest) -> Mapping[str, object]:
    """Settings of `evaluate`, which are nested in those of a sweep, with the system prompt of the data."""
    own = _mapping(manifest.settings, "protocol") if manifest.stage == "sweep" else manifest.settings
    data = read_manifest(workspace.stage_directory("prepare_data", manifest.upstream.get("data", "")))
    prompt = None if data is None else _mapping(data.settings, "data").get(_SYSTEM_PROMPT)
    return {**own, _SYSTEM_PROMPT: prompt}


def _read(
    directory: Path, manifest: Manifest, settings: Mapping[str, object], model: str, step: int | None = None
) -> Iterator[_Found]:
    results = read_results(directory / RESULTS_FILE)
    correct, references = _read_samples(directory)
    for row in results.rows:
        counts, golds = correct[row.suite, row.decoding], references[row.suite, row.decoding]
        yield _Found(
            model=(model, str(_mapping(settings, "evaluation").get("engine")), str(settings.get("dtype"))),
            checkpoint=results.checkpoint if step is None else "rl",
            step=step,
            protocol=_protocol(settings, results, row.decoding),
            column=Column(row.suite, row.num_problems, row.num_samples, _problems(settings, row.suite, golds)),
            cell=BoardCell(row, counts, manifest.key, manifest.ended),
        )


def _read_samples(directory: Path) -> tuple[dict[Cell, dict[str, int]], dict[Cell, dict[str, str]]]:
    """Correct responses and the reference answer, by suite and decoding and then by problem."""
    correct: dict[Cell, dict[str, int]] = {}
    references: dict[Cell, dict[str, str]] = {}
    for record in read_samples_of(directory):
        cell = record.suite, record.decoding
        counts = correct.setdefault(cell, {})
        counts[record.uid] = counts.get(record.uid, 0) + record.correct
        references.setdefault(cell, {})[record.uid] = record.ground_truth
    return correct, references


def _entries(found: Iterable[_Found], uses: Mapping[str, Sequence[Use]]) -> list[Entry]:
    groups: dict[tuple[_Model, str], list[_Found]] = {}
    for item in found:
        groups.setdefault((item.model, item.protocol.key), []).append(item)
    models = list(dict.fromkeys(model for model, _ in groups))
    names = dict(zip(models, _names(models, groups, uses), strict=True))
    return [
        Entry(
            name=names[model],
            model=model[0],
            protocol=items[0].protocol,
            cells=_newest(items),
            runs=tuple(dict.fromkeys(use.run for use in _uses_of(items, uses))),
        )
        for (model, _), items in groups.items()
    ]


def _names(
    models: Sequence[_Model],
    groups: Mapping[tuple[_Model, str], Sequence[_Found]],
    uses: Mapping[str, Sequence[Use]],
) -> list[RowName]:
    """One name per model, independent of the protocols of its evaluations."""
    items = {
        model: [item for (other, _), group in groups.items() if other == model for item in group] for model in models
    }
    used = [_uses_of(items[model], uses) for model in models]
    names = [
        name_row(using, items[model][0].checkpoint, items[model][0].step)
        for model, using in zip(models, used, strict=True)
    ]
    fallback = [", ".join(filter(None, (engine, dtype, digest[:8]))) for digest, engine, dtype in models]
    return tell_apart(names, used, fallback)


def _uses_of(items: Iterable[_Found], uses: Mapping[str, Sequence[Use]]) -> list[Use]:
    keys = dict.fromkeys(item.cell.evaluation for item in items)
    return [use for key in reversed(keys) for use in uses.get(key, ())]


def _newest(items: Sequence[_Found]) -> dict[Column, BoardCell]:
    cells: dict[Column, BoardCell] = {}
    for item in items:  # the newest come first
        cells.setdefault(item.column, item.cell)
    return cells


def _protocol(of_stage: Mapping[str, object], results: EvaluationResults, decoding: str) -> EvaluationProtocol:
    evaluation = _mapping(of_stage, "evaluation")
    sampling = _mapping(_mapping(evaluation, "decodings"), decoding)
    shared = {name: value for name, value in evaluation.items() if name not in _APART}
    settings = flatten(sampling) | flatten(shared)
    grading = {f"grading.{name}": value for name, value in flatten(of_stage.get("grading")).items()}
    if evaluation.get("template", _OWN_TEMPLATE) == _OWN_TEMPLATE:  # the other templates have their own system message
        grading[f"data.{_SYSTEM_PROMPT}"] = json.dumps(of_stage.get(_SYSTEM_PROMPT))
    text = _in_words(settings)
    return EvaluationProtocol(decoding, settings | grading | {"confidence": str(results.confidence)}, text)


def _in_words(settings: Mapping[str, str]) -> str:
    """The protocol for a reader, without the number of responses, which columns name."""
    left = {name: value for name, value in settings.items() if value not in _NOT_SET and name != "num_samples"}
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
    evaluation = _mapping(settings, "evaluation")
    own = [_mapping(evaluation, name).get(suite) for name in _OF_SUITES]
    content = json.dumps([sorted(references.items()), [each for each in own if each is not None]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def _mapping(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}

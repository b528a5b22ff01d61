"""`luffy rescore` and `luffy diff`: finished evaluations graded again, or compared."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from luffy.config.grading import ChoiceGrader, GraderKind, GradingConfig
from luffy.config.settings import EvaluateSettings, SweepSettings
from luffy.config.yaml_source import parse_scalar
from luffy.errors import ConfigError, DataError
from luffy.evaluation.changes import CellChanges, ChangedProblem, Changes, ProblemAnswers, find_changes
from luffy.evaluation.rescoring import read_problems, regrade, write_regraded
from luffy.evaluation.results import FinishedEvaluation, ResultRow, read_evaluation
from luffy.evaluation.sample_files import SampleRecord
from luffy.grading.kinds import leaves
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.grading.request import Problem
from luffy.pipeline.job import JOB_FILE, inputs_of, read_job
from luffy.report.evaluation_page import write_summaries

Rows = list[tuple[str, ...]]
_RESCORED = "rescored"
_WITHHELD = "(confidential)"
_CHOICE = ChoiceGrader().kind
_MAX_ANSWER = 60
_MAX_FOLDER_NAME = 60
_ANSWERS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Rescored:
    """The result of `rescore` for display."""

    folder: Path
    scores: Rows
    """One row per suite and decoding."""
    changed: Rows
    """One row per response whose verdict changed."""
    notes: tuple[str, ...]


SCORE_HEADER = ("suite", "decoding", "before", "after", "now correct", "no longer")
CHANGED_HEADER = ("suite", "problem", "sample", "reference", "before", "after", "why")
COMPARISON_HEADER = (
    "suite", "decoding", "problems", "first", "second", "difference", "interval", "wins/ties/losses", "p (Holm)", "",
)  # fmt: skip
PROBLEM_HEADER = ("problem", "subject", "reference", "first", "second", "first answered", "second answered")


def rescore(directory: Path, grader: str, folder: Path | None, suites: Sequence[str]) -> Rescored:
    """Grade the responses of the finished evaluation in `directory` again, and write what comes out.

    `grader`: a kind by name, a name of the evaluation's `grading.named`, or a kind with its settings in YAML. `suites`
    empty: all. Without `folder` it is a folder in `rescored/` of the stage. Raises ConfigError for an unknown grader or
    suite, DataError without an evaluation.
    """
    evaluation = read_evaluation(directory)
    grading, data = _surroundings(directory)
    kind = read_kind(grader, grading)
    chosen, notes = _chosen(evaluation, suites, kind)
    problems: dict[tuple[str, str], Problem] = {}
    if data is None:
        notes.append(f"{directory} does not say where its data is: graded without the questions and their options")
    else:
        problems = read_problems(data / "suites", chosen)
    folder = folder or directory / _RESCORED / _folder_name(grader)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made ({error.strerror}); give another folder") from None
    with GraderPool.configured(
        os.cpu_count() or 1, grading, folder / JUDGE_CACHE, (kind,), check_functions=False
    ) as pool:
        regraded = regrade(evaluation, kind, pool, problems, chosen)
        comparison = write_regraded(folder, evaluation, regraded, write_summaries)
    scores: Rows = []
    for part in comparison:
        gained = sum(new.correct for _, new in part.changed)
        accuracies = _score(part.before), _score(part.after)
        scores.append(
            (part.before.suite, part.before.decoding, *accuracies, f"+{gained}", f"-{len(part.changed) - gained}")
        )
    changed = [_changed_row(old, new) for part in comparison for old, new in part.changed]
    return Rescored(folder, scores, changed, tuple(notes))


def read_kind(text: str, grading: GradingConfig) -> GraderKind:
    """The kind of grader that `text` names or describes; ConfigError for anything else."""
    if text in grading.names:
        return grading.grader(text)
    try:
        return TypeAdapter(GraderKind).validate_json(json.dumps(parse_scalar(text)))
    except (ValidationError, YAMLError):
        raise ConfigError(
            f"--grader {text}: no such grader; there are {', '.join(grading.names)}, and kinds with their settings, "
            "e.g. '{kind: math, boxed: preferred}'"
        ) from None


def compare_evaluations(first: Path, second: Path) -> Changes:
    """Compare two finished evaluations, problem by problem. Raises DataError where there is nothing to compare."""
    return find_changes(read_evaluation(first), read_evaluation(second))


def remarks(part: CellChanges) -> list[str]:
    """Further notes on the comparison."""
    found = []
    if part.only_first or part.only_second:
        found.append(
            f"not compared: {part.only_first} problems only in the first, {part.only_second} only in the second"
        )
    if part.other_reference:
        found.append(f"{part.other_reference} problems have another reference answer in the second evaluation")
    return found


def _surroundings(directory: Path) -> tuple[GradingConfig, Path | None]:
    """How the evaluation graded and where its data is, as far as its directory records it."""
    # A sweep's steps lie in its directory.
    home = next((folder for folder in (directory, directory.resolve().parent) if (folder / JOB_FILE).is_file()), None)
    if home is None:
        return GradingConfig(), None
    job = read_job(home / JOB_FILE)
    settings = job.settings.protocol if isinstance(job.settings, SweepSettings) else job.settings
    if not isinstance(settings, EvaluateSettings):
        raise DataError(f"{directory}: only evaluations can be graded again, this is {job.stage}")
    return settings.grading, inputs_of(job, home)["data"]


def _chosen(evaluation: FinishedEvaluation, suites: Sequence[str], kind: GraderKind) -> tuple[list[str], list[str]]:
    """The suites to grade, and notes on their choice.

    Beside other suites multiple choice is left out, unless `kind` reads letters: under a grader of mathematics a letter
    without a box is no answer.
    """
    rows = evaluation.results.rows
    there = list(dict.fromkeys(row.suite for row in rows))
    unknown = [name for name in suites if name not in there]
    if unknown:
        raise ConfigError(f"--suite {unknown[0]}: is not in this evaluation; there are {', '.join(there)}")
    if suites:
        return [name for name in there if name in suites], []
    graders = {name: {kind for row in rows if row.suite == name for kind in row.graders} for name in there}
    letters = any(isinstance(leaf, ChoiceGrader) for leaf in leaves(kind))
    left_out = [name for name in there if graders[name] == {_CHOICE} and not letters]
    if left_out == there:
        return there, []
    notes = [f"{name}: multiple choice, left as it is; --suite {name} grades it, too" for name in left_out]
    return [name for name in there if name not in left_out], notes


def _folder_name(grader: str) -> str:
    """The grader as part of a path; one written out in YAML by its beginning and a hash."""
    if grader.isidentifier():
        return grader
    name = "".join(c if c.isalnum() or c in "_-" else "_" for c in grader).strip("_")
    return f"{name[:_MAX_FOLDER_NAME]}_{hashlib.sha256(grader.encode()).hexdigest()[:8]}"


def _score(row: ResultRow) -> str:
    low, high = row.interval
    return f"{100 * row.accuracy:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _changed_row(old: SampleRecord, new: SampleRecord) -> tuple[str, ...]:
    if not old.may_be_shown:
        texts = (_WITHHELD, old.outcome, new.outcome, _WITHHELD)
    else:
        texts = (_short(old.ground_truth), _verdict(old), _verdict(new), new.reason)
    return (old.suite, old.uid, str(old.sample), *texts)


def _verdict(record: SampleRecord) -> str:
    return record.outcome if record.answer is None else f"{record.outcome}: {_short(record.answer)}"


def comparison_row(part: CellChanges) -> tuple[str, ...]:
    """A suite under a decoding, `second` minus `first`; under `COMPARISON_HEADER`."""
    paired = part.comparison.paired
    low, high = paired.difference.interval
    return (
        *part.cell,
        str(paired.difference.num_problems),
        f"{100 * part.accuracies[0]:.1f}",
        f"{100 * part.accuracies[1]:.1f}",
        f"{100 * paired.difference.value:+.1f}",
        f"[{100 * low:+.1f}, {100 * high:+.1f}] {paired.difference.method}",
        f"{paired.wins}/{paired.ties}/{paired.losses}",
        f"{part.comparison.adjusted_p:.2g}",
        "significant" if part.comparison.is_significant else "",
    )


def problem_row(problem: ChangedProblem) -> tuple[str, ...]:
    """A problem whose result changed, under `PROBLEM_HEADER`; without the text of a confidential one."""
    shown = not problem.confidential
    return (
        problem.uid,
        problem.subject or "",
        _short(problem.ground_truth) if shown else _WITHHELD,
        f"{problem.first.num_correct}/{problem.first.num_samples}",
        f"{problem.second.num_correct}/{problem.second.num_samples}",
        _answers(problem.first) if shown else _WITHHELD,
        _answers(problem.second) if shown else _WITHHELD,
    )


def _answers(said: ProblemAnswers) -> str:
    """The most frequent answers, with how often each was given where there are several responses."""
    texts = [
        ("no answer" if answer is None else _short(answer)) + (f" x{count}" if said.num_samples > 1 else "")
        for answer, count in said.answers[:_ANSWERS_SHOWN]
    ]
    return ", ".join(texts) + (", ..." if len(said.answers) > _ANSWERS_SHOWN else "")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_ANSWER else line[: _MAX_ANSWER - 3] + "..."

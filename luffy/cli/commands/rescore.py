"""`luffy rescore EVALUATION --grader KIND`: responses graded again; `luffy diff FIRST SECOND`: two evaluations."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import TypeAdapter, ValidationError
from typer import Argument, Option
from yaml import YAMLError

from luffy.cli.console import say, show_rows, shown_of
from luffy.cli.options import Debug
from luffy.config.execution import ExecutionConfig
from luffy.config.grading import ChoiceGrader, GraderKind, GradingConfig, leaves
from luffy.config.settings import EvaluateSettings, SweepSettings
from luffy.config.yaml_source import parse_scalar
from luffy.errors import EXIT_OK, ConfigError, DataError
from luffy.evaluation.changes import find_changes
from luffy.evaluation.regrading import read_problems, regrade
from luffy.evaluation.results import FinishedEvaluation, ProblemTally, read_evaluation
from luffy.evaluation.sample_files import SampleRecord
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.grading.request import Problem
from luffy.pipeline.job import JOB_FILE, inputs_of, read_job
from luffy.report.cells import accuracy
from luffy.report.evaluation_page import write_summaries

_WITHHELD = "(confidential)"
_MAX_ANSWER = 60
_MAX_FOLDER_NAME = 60
_ANSWERS_SHOWN = 3
_COMPARISON_HEADER = (
    "suite", "decoding", "problems", "first", "second", "difference", "interval", "wins/ties/losses", "p (Holm)", "",
)  # fmt: skip
_PROBLEM_HEADER = ("problem", "subject", "reference", "first", "second", "first answered", "second answered")


def rescore(
    stage: Annotated[
        Path, Argument(metavar="EVALUATION", help="a finished evaluation: workspace/runs/RUN/stages/evaluate_rl")
    ],
    grader: Annotated[str, Option(help="math, math_strict, choice, exact, or a kind with its settings in YAML")],
    out: Annotated[
        Path | None, Option(metavar="DIR", help="folder to write to [rescored/GRADER below the evaluation]")
    ] = None,
    suite: Annotated[list[str] | None, Option(metavar="NAME", help="only this suite; may be repeated")] = None,
    show: Annotated[int, Option(min=0, metavar="N", help="list N changes at most")] = 20,
    debug: Debug = False,
) -> int:
    """Grade an evaluation's responses again by another grader."""
    evaluation = read_evaluation(stage)
    grading, data = _surroundings(stage)
    kind = _read_kind(grader, grading)
    chosen, notes = _chosen(evaluation, suite or [], kind)
    problems: dict[tuple[str, str], Problem] = {}
    if data is None:
        notes.append(f"{stage} does not say where its data is: graded without the questions and their options")
    else:
        problems = read_problems(data / "suites", chosen)
    name = grader
    if not grader.isidentifier():  # written out in YAML: its beginning and a hash
        name = "".join(c if c.isalnum() or c in "_-" else "_" for c in grader).strip("_")
        name = f"{name[:_MAX_FOLDER_NAME]}_{hashlib.sha256(grader.encode()).hexdigest()[:8]}"
    folder = out or stage / "rescored" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made ({error.strerror}); give another folder") from None
    everywhere = ExecutionConfig(grader_workers=os.cpu_count() or 1)
    with GraderPool.configured(everywhere, grading, folder / JUDGE_CACHE, (kind,), check_functions=False) as pool:
        comparison = regrade(folder, evaluation, chosen, problems, kind, pool, write_summaries)
    scores, changed = [], list[tuple[str, ...]]()
    for part in comparison:
        gained = sum(new.correct for _, new in part.changed)
        accuracies = (accuracy(row.estimate).plain for row in (part.before, part.after))
        lost = len(part.changed) - gained
        scores.append((part.before.suite, part.before.decoding, *accuracies, f"+{gained}", f"-{lost}"))
        for old, new in part.changed:
            texts = (_WITHHELD, old.outcome, new.outcome, _WITHHELD)
            if old.may_be_shown:
                texts = (_short(old.ground_truth), _verdict(old), _verdict(new), new.reason)
            changed.append((old.suite, old.uid, str(old.sample), *texts))
    say(f"graded again by {grader}")
    show_rows(("suite", "decoding", "before", "after", "now correct", "no longer"), scores)
    if changed:
        say(f"\n{shown_of(len(changed), show)} responses with another verdict")
        header = ("suite", "problem", "sample", "reference", "before", "after", "why")
        show_rows(header, changed[:show])
    for note in notes:
        say(note)
    say(f"written to {folder}")
    return EXIT_OK


def diff(
    first: Annotated[Path, Argument(help="directory of a finished evaluation, e.g. runs/mine-1/stages/evaluate_rl")],
    second: Annotated[Path, Argument(help="another one; they must share suites")],
    show: Annotated[int, Option(min=0, metavar="N", help="list N changed problems at most")] = 20,
    debug: Debug = False,
) -> int:
    """Compare two evaluations: the paired difference of each suite, and the problems whose result changed."""
    changes = find_changes(read_evaluation(first), read_evaluation(second))
    say(f"{second} minus {first}, in percentage points")
    rows = []
    for part in changes.cells:
        paired, found = part.comparison.paired, part.comparison.paired.difference
        low, high = found.interval
        shares = (f"{100 * share:.1f}" for share in part.accuracies)
        interval = f"[{100 * low:+.1f}, {100 * high:+.1f}] {found.method}"
        verdict = (f"{part.comparison.adjusted_p:.2g}", "significant" if part.comparison.is_significant else "")
        difference = (f"{100 * found.value:+.1f}", interval, f"{paired.wins}/{paired.ties}/{paired.losses}")
        rows.append((*part.cell, str(found.num_problems), *shares, *difference, *verdict))
    show_rows(_COMPARISON_HEADER, rows)
    for suite, decoding in changes.left_out:
        say(f"{suite}, {decoding}: only in one of the two")
    for part in changes.cells:
        say(f"\n{', '.join(part.cell)}: {shown_of(len(part.changed), show)} changed")
        problems = []
        for problem in part.changed[:show]:
            both, is_shown = (problem.first, problem.second), problem.may_be_shown
            counts = (f"{each.num_correct}/{len(each.votes)}" for each in both)
            answers = (_answers(each) if is_shown else _WITHHELD for each in both)
            reference = _short(problem.first.ground_truth) if is_shown else _WITHHELD
            problems.append((problem.uid, problem.first.subject or "", reference, *counts, *answers))
        if problems:
            show_rows(_PROBLEM_HEADER, problems)
        if part.only_first or part.only_second:
            say(f"not compared: {part.only_first} problems only in the first, {part.only_second} only in the second")
        if part.other_reference:
            say(f"{part.other_reference} problems have another reference answer in the second evaluation")
    return EXIT_OK


def _read_kind(text: str, grading: GradingConfig) -> GraderKind:
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
    graders: dict[str, set[str]] = {}
    for row in evaluation.results.rows:
        graders.setdefault(row.suite, set()).update(row.graders)
    if unknown := [name for name in suites if name not in graders]:
        raise ConfigError(f"--suite {unknown[0]}: is not in this evaluation; there are {', '.join(graders)}")
    if suites:
        return [name for name in graders if name in suites], []
    letters = any(isinstance(leaf, ChoiceGrader) for leaf in leaves(kind))
    left_out = [name for name, kinds in graders.items() if kinds == {ChoiceGrader().kind} and not letters]
    if len(left_out) == len(graders):
        return left_out, []
    notes = [f"{name}: multiple choice, left as it is; --suite {name} grades it, too" for name in left_out]
    return [name for name in graders if name not in left_out], notes


def _verdict(record: SampleRecord) -> str:
    return record.outcome if record.answer is None else f"{record.outcome}: {_short(record.answer)}"


def _answers(problem: ProblemTally) -> str:
    """The most frequent answers, with how often each was given where there are several responses."""
    counts = Counter(answer for answer, _ in problem.votes)
    texts = [
        ("no answer" if answer is None else _short(answer)) + (f" x{count}" if len(problem.votes) > 1 else "")
        for answer, count in counts.most_common(_ANSWERS_SHOWN)
    ]
    return ", ".join(texts) + (", ..." if len(counts) > _ANSWERS_SHOWN else "")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_ANSWER else line[: _MAX_ANSWER - 3] + "..."

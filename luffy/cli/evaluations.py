"""Evaluations on the command line: made of foreign responses, graded again, compared, ranked.

`luffy evaluate --responses`, `luffy rescore`, `luffy diff`, `luffy show --leaderboard`.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from luffy.cli.console import say, show_rows, shown_of, terminal
from luffy.cli.run_view import show_results
from luffy.config import STAGE_KINDS, ExperimentConfig
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import ExecutionConfig
from luffy.config.grading import ChoiceGrader, GraderKind, GradingConfig, leaves
from luffy.config.settings import EvaluateSettings, SweepSettings
from luffy.config.shipped import expand_pattern
from luffy.config.strict import run_name
from luffy.config.yaml_source import parse_scalar
from luffy.errors import ConfigError, DataError
from luffy.evaluation.across_runs.all_results import read_leaderboard
from luffy.evaluation.changes import find_changes
from luffy.evaluation.regrading import DECODING, read_problems, read_responses, regrade, write_responses
from luffy.evaluation.results import RESULTS_FILE, FinishedEvaluation, ProblemTally, read_evaluation
from luffy.evaluation.sample_files import SAMPLES_FILE, SampleRecord
from luffy.files import write_atomic
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.grading.request import Problem
from luffy.pipeline.identity import KEY_LENGTH, code_of
from luffy.pipeline.job import JOB_FILE, inputs_of, read_job
from luffy.pipeline.manifest import (
    Manifest,
    collect_outputs,
    hardware,
    hash_file,
    package_versions,
    read_manifest,
    write_manifest,
)
from luffy.pipeline.outside import outside_files
from luffy.pipeline.workspace import Workspace, claiming, link
from luffy.report.cells import accuracy
from luffy.report.evaluation_page import MARK, PAGE_FILE, SUMMARY_FILE, leaderboard_page, write_summaries
from luffy.report.page import html

_WITHHELD = "(confidential)"
_MAX_ANSWER = 60
_MAX_FOLDER_NAME = 60
_ANSWERS_SHOWN = 3
_COMPARISON_HEADER = (
    "suite", "decoding", "problems", "first", "second", "difference", "interval", "wins/ties/losses", "p (Holm)", "",
)  # fmt: skip
_PROBLEM_HEADER = ("problem", "subject", "reference", "first", "second", "first answered", "second answered")


def evaluate_responses(
    workspace: Workspace, patterns: Sequence[str], experiment: ExperimentConfig | None, model: str | None
) -> None:
    """Grade responses that another system sampled and print the accuracies; the workspace gets a run and its stage.

    `experiment` says how to grade, `model` names the row of the leaderboard (None: the first file's name). Equal files
    that were graded before by the same code are not graded again. Raises DataError as `read_responses`.
    """
    files = [path for pattern in patterns for path in expand_pattern(pattern) or (Path(pattern),)]
    name, grading = model or files[0].stem, GradingConfig() if experiment is None else experiment.grading
    problems = read_responses(files, grading)
    config = experiment.evaluation if experiment is not None else None
    config = config or EvaluationConfig(max_response_tokens=1)  # which no response is cut by
    suites = {suite: each.model_dump(mode="json") for suite, each in config.suites.items()}
    settings = {
        "evaluation": {"decodings": {DECODING: {}}, "suites": suites},
        "grading": grading.model_dump(mode="json"),
    }
    outside = [outside_files(each) for each in (grading, config)]
    made_from = [name, settings, config.confidence, [hash_file(path) for path in files], outside]
    code = code_of("evaluate", STAGE_KINDS["evaluate"].rooms)
    key = hashlib.sha256(json.dumps([made_from, code], sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]
    directory, node = workspace.stage_directory("evaluate", key), "evaluate_responses"
    manifest, began = read_manifest(directory), datetime.now(UTC).isoformat()
    if manifest is not None and not manifest.damaged(directory):
        say("graded before")
    else:
        workspace.prepare()
        with (
            claiming(workspace),
            GraderPool.configured(
                _on_all_cores(experiment), grading, directory / JUDGE_CACHE, config.own_graders, check_functions=False
            ) as pool,
        ):
            write_responses(directory, name, problems, config, pool, write_summaries)
            outputs = collect_outputs(directory, (SAMPLES_FILE, RESULTS_FILE, SUMMARY_FILE, PAGE_FILE))
            ended = datetime.now(UTC).isoformat()
            manifest = Manifest(
                stage="evaluate", node=node, key=key, series=None, settings=settings, upstream={},
                consumed={"model": hashlib.sha256(name.encode()).hexdigest()}, outputs=outputs, metrics={},
                execution=ExecutionConfig(), versions=package_versions(), hardware=hardware(), started=began,
                ended=ended,
            )  # fmt: skip
            write_manifest(directory, manifest)
            stage = {"key": key, "directory": str(directory), "action": "graded", "reason": ", ".join(map(str, files))}
            experiment_name = run_name(name)
            record = {"experiment": experiment_name, "state": "finished", "started": began, "updated": ended}
            run = workspace.new_run(experiment_name, {**record, "stages": {node: stage}, "config": {}})
            link(directory, run / "stages" / node)
    show_results([directory])
    say(f"{sum(len(problem.responses) for problem in problems)} responses to {len(problems)} problems: {directory}")


def rescore(directory: Path, grader: str, folder: Path | None, suites: Sequence[str], show: int) -> None:
    """Grade the responses of the finished evaluation in `directory` again; write and print what comes out.

    `grader`: a kind by name, a name of the evaluation's `grading.named`, or a kind with its settings in YAML. `suites`
    empty: all. Without `folder` it is a folder in `rescored/` of the stage. At most `show` changes are printed. Raises
    ConfigError for an unknown grader or suite, DataError without an evaluation.
    """
    evaluation = read_evaluation(directory)
    grading, data = _surroundings(directory)
    kind = _read_kind(grader, grading)
    chosen, notes = _chosen(evaluation, suites, kind)
    problems: dict[tuple[str, str], Problem] = {}
    if data is None:
        notes.append(f"{directory} does not say where its data is: graded without the questions and their options")
    else:
        problems = read_problems(data / "suites", chosen)
    if folder is None:
        name = grader
        if not grader.isidentifier():  # written out in YAML: its beginning and a hash
            name = "".join(c if c.isalnum() or c in "_-" else "_" for c in grader).strip("_")
            name = f"{name[:_MAX_FOLDER_NAME]}_{hashlib.sha256(grader.encode()).hexdigest()[:8]}"
        folder = directory / "rescored" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made ({error.strerror}); give another folder") from None
    with GraderPool.configured(
        _on_all_cores(None), grading, folder / JUDGE_CACHE, (kind,), check_functions=False
    ) as pool:
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


def _on_all_cores(experiment: ExperimentConfig | None) -> ExecutionConfig:
    execution = ExecutionConfig() if experiment is None else experiment.execution
    return execution.model_copy(update={"grader_workers": os.cpu_count() or 1})


def diff(first: Path, second: Path, show: int) -> None:
    """Print how two finished evaluations compare, and at most `show` changed problems of each suite.

    Raises DataError where there is nothing to compare.
    """
    changes = find_changes(read_evaluation(first), read_evaluation(second))
    say(f"{second} minus {first}, in percentage points")
    rows = []
    for part in changes.cells:
        paired = part.comparison.paired
        low, high = paired.difference.interval
        rows.append(
            (
                *part.cell,
                str(paired.difference.num_problems),
                *(f"{100 * share:.1f}" for share in part.accuracies),
                f"{100 * paired.difference.value:+.1f}",
                f"[{100 * low:+.1f}, {100 * high:+.1f}] {paired.difference.method}",
                f"{paired.wins}/{paired.ties}/{paired.losses}",
                f"{part.comparison.adjusted_p:.2g}",
                "significant" if part.comparison.is_significant else "",
            )
        )
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
            only = f"{part.only_first} problems only in the first, {part.only_second} only in the second"
            say(f"not compared: {only}")
        if part.other_reference:
            say(f"{part.other_reference} problems have another reference answer in the second evaluation")


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
    unknown = [name for name in suites if name not in graders]
    if unknown:
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


def show_leaderboard(workspace: Workspace) -> None:
    """Write the page into the workspace, and print the tables and where the page is.

    Raises DataError when the workspace has no finished evaluation.
    """
    if not workspace.root.is_dir():
        raise DataError(f"workspace {workspace.root}: no such folder; give another with --workspace")
    board, file = read_leaderboard(workspace), workspace.root / "leaderboard.html"
    page = leaderboard_page(board, str(workspace.root))
    write_atomic(file, html(page))
    console = terminal()
    for table, section in zip(board.tables, page.sections[1:], strict=False):
        (accuracies,) = section.tables
        title = f"{section.title}; {section.aside}" + (f" ({table.note})" if table.note else "")
        console.print(title, markup=False, soft_wrap=True, style="bold")
        rows = [["\n".join((cell.text, *cell.details)) for cell in row] for row in accuracies.rows]
        show_rows(accuracies.header, rows)
        console.print()
    for directory, reason in board.left_out.items():
        say(f"left out: {directory}: {reason}")
    say(
        f"Accuracy in % with its interval over problems. {MARK}: clearly better than the next row on that suite "
        "(paired over problems, Holm's correction over suites); without it the first ones are not distinguishable."
    )
    say(f"leaderboard: {file}")

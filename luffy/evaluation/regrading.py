"""Saved responses, graded: those of another system, and those of an evaluation again by another grader.

    problems = read_responses([Path("responses.parquet")], grading)
    results = write_responses(folder, "their model", problems, config, pool, write_summaries)

verl's `main_eval` and LUFFY's `generate_vllm.py` write a row for a problem or a response, verl's trainer the columns
`input`, `output` and `gts` (`rollout_data_dir`).
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from luffy.config.evaluation import VALIDATION, EvaluationConfig
from luffy.config.grading import GraderKind, GradingConfig
from luffy.data.parquet import VALIDATION_FILE, read_prompts
from luffy.data.schema import RowError, prompt_from_row, value_at
from luffy.data.sources.stored_rows import READERS
from luffy.data.templates import opener_of
from luffy.errors import DataError
from luffy.evaluation.results import Cell, EvaluationResults, FinishedEvaluation, ResultRow, write_counted
from luffy.evaluation.sample_files import SAMPLES_FILE, SampleRecord, ungraded_record, write_sample_records
from luffy.grading.extract import asks_for_tag
from luffy.grading.pool import GraderPool
from luffy.grading.request import TOKENS, GradeRequest, Problem, problem_of, require_verdicts
from luffy.types import Prompt

DECODING = "elsewhere"
"""Name of the decoding, whose sampling is unknown."""
_RESPONSES = ("responses", "generated_text", "response", "completions", "completion", "output")
_PROMPTS = ("prompt", "problem", "question", "input", "messages")
_REFERENCES = ("reward_model.ground_truth", "ground_truth", "answer", "label", "gts")
_SUITES = ("data_source", "task")
"""Names of columns; the first that a row has is taken."""
_OF_HARNESSES = ("doc", "resps")
"""Columns of lighteval's and lm-evaluation-harness's files, which earlier versions read."""
_BATCH = 1024
"""Responses that are graded at a time."""
_MAX_LABEL = 100
"""Longer texts beside a response are no subject or level."""
WritePages = Callable[[Path, EvaluationResults], None]
Verdicts = tuple[SampleRecord, SampleRecord]
"""A response with its old grade and with its new one."""


@dataclass(slots=True)
class AnsweredProblem:
    """A problem with the responses to it, in the order of the files."""

    prompt: Prompt
    text: str
    """The prompt as the model saw it, where the file has it as one text; else the turns."""
    is_rendered: bool
    place: str
    """File and row."""
    suite: str
    """As the file names it; the prompt's `data_source` can be part of a path."""
    responses: list[str] = field(default_factory=list)


def read_responses(files: Sequence[Path], grading: GradingConfig) -> list[AnsweredProblem]:
    """Return the problems of all files, a suite after the other; repeated problems are joined.

    DataError, with file, row and field, for a row without a prompt, a reference or a text as a response, or with a
    grader that `grading` does not have; for a problem with two references, and for a suite whose problems have
    different numbers of responses.
    """
    suites: dict[str, dict[str, AnsweredProblem]] = {}
    for path in files:
        if path.suffix not in READERS:
            raise DataError(f"{path}: extension {path.suffix!r}; use one of {', '.join(READERS)}")
        if not path.is_file():
            raise DataError(f"{path}: no such file (working directory {Path.cwd()})")
        for number, row in READERS[path.suffix](path, None, ()):
            place = f"{path}, row {number}"
            try:
                if isinstance(row, RowError):
                    raise row
                problem = _problem(row, path, place)
                if (named := problem.prompt.grader) not in (None, *grading.names):
                    there = ", ".join(("rule", *grading.names))
                    raise RowError("reward_model.style", f"{named} is no grader; there are {there}")
            except RowError as error:
                raise DataError(f"{place}, field {error.field}: {error.reason}") from None
            beside = suites.setdefault(problem.prompt.data_source, {})
            first = next(iter(beside.values()), problem)
            if first.suite != problem.suite:
                raise DataError(
                    f"{place}: suites {problem.suite!r} and {first.suite!r} ({first.place}) would both be "
                    f"{problem.prompt.data_source}; rename one"
                )
            known = beside.setdefault(problem.prompt.uid, problem)
            if known.prompt.ground_truth != problem.prompt.ground_truth:
                raise DataError(f"{place}: another reference answer than the same problem has in {known.place}")
            if known is not problem:
                known.responses += problem.responses
    for suite, problems in suites.items():
        (count, _), *_ = Counter(len(problem.responses) for problem in problems.values()).most_common()
        fewest = min(len(problem.responses) for problem in problems.values())
        for problem in problems.values():
            if (other := len(problem.responses)) != count:
                # Intervals, maj@k and comparisons rest on one number, and so does their published coverage.
                raise DataError(
                    f"{problem.place}: {other} responses, where most problems of {suite} have {count}; an interval "
                    f"needs as many to each: keep the first {fewest} of each problem, or leave this one out"
                )
    if not suites:
        raise DataError(f"{', '.join(map(str, files)) or 'no file'}: no row")
    return [problem for problems in suites.values() for problem in problems.values()]


def _problem(row: Mapping[str, object], path: Path, place: str) -> AnsweredProblem:
    def first(names: Sequence[str], what: str) -> object:
        found = (value_at(row, name) for name in names if name.partition(".")[0] in row)
        if (value := next((each for each in found if each is not None), None)) is None:
            raise RowError(what, f"is missing; it is looked for in {', '.join(names)}")
        return value

    if foreign := next((name for name in _OF_HARNESSES if name in row), None):
        raise RowError(foreign, "files of other harnesses are not read; give rows with problem, answer and response")
    reference = first(_REFERENCES, "reference")
    while isinstance(reference, list) and len(reference) == 1:
        reference = reference[0]
    suite = next((str(row[name]) for name in _SUITES if row.get(name)), path.stem)
    model = row.get("reward_model")
    extra = row.get("extra_info")
    labels = {
        name: value
        for name, value in row.items()
        if isinstance(value, int) or (isinstance(value, str) and len(value) <= _MAX_LABEL)
    }
    as_stored: dict[str, object] = {
        "uid": row.get("uid"),
        "data_source": re.sub(r"[^A-Za-z0-9_.-]+", "_", suite).strip("_") or path.stem,
        "prompt": first(_PROMPTS, "prompt"),
        "reward_model": {
            "style": model.get("style") if isinstance(model, Mapping) else None,
            "ground_truth": reference,
        },
        "extra_info": labels if extra is None else extra,
    }
    read = prompt_from_row(as_stored, is_asked=False)
    is_rendered = isinstance(as_stored["prompt"], str) and len(read.messages) == 1
    shown = "\n\n".join(message.content for message in read.messages)
    opener = opener_of(shown) if is_rendered else ""
    responses = [opener + text for text in _texts(first(_RESPONSES, "responses"))]
    return AnsweredProblem(read, shown, is_rendered, place, suite, responses)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, list) and value:
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value
    else:
        raise RowError("responses", f"must be a text or texts, found {str(value)[:60]}")


def write_responses(
    folder: Path,
    model: str,
    problems: Sequence[AnsweredProblem],
    config: EvaluationConfig,
    grader: GraderPool,
    write_pages: WritePages,
) -> EvaluationResults:
    """Grade all responses and write to `folder` what an evaluation of `model` has: samples, results and pages.

    A suite's grader is that of `config`, as far as it has one, else that of the row or of the pool. Numbers of tokens
    and the ends of responses are unknown: 0 and "".
    """

    def asked() -> Iterator[tuple[SampleRecord, GradeRequest]]:
        for each in problems:
            suite = each.prompt.data_source
            problem = problem_of(each.prompt, each.text if each.is_rendered else "")
            kind = config.protocol(suite, next(iter(config.decodings))).grader
            for number, response in enumerate(each.responses):
                record = ungraded_record(
                    each.prompt, each.text, suite=suite, decoding=DECODING, sample=number, seed=0, response=response,
                    finish_reason="", num_tokens=0,
                )  # fmt: skip
                yield record, GradeRequest(response, each.prompt.ground_truth, problem, kind)

    folder.mkdir(parents=True, exist_ok=True)
    graded = _graded(asked(), grader, "nothing is written; repeat the command")
    write_sample_records(folder / SAMPLES_FILE, (new for _, new in graded))
    return write_counted(folder, model, config.confidence, {}, write_pages)


@dataclass(frozen=True, slots=True)
class Regraded:
    """A suite under a decoding, before and after."""

    before: ResultRow
    after: ResultRow
    changed: tuple[Verdicts, ...]
    """Responses that one of the graders calls correct and the other does not, without their texts."""


def read_problems(suites: Path, names: Sequence[str]) -> dict[tuple[str, str], Problem]:
    """What graders need of the problems of the suites `names`, by suite and uid; DataError without their files."""
    found: dict[tuple[str, str], Problem] = {}
    for name in names:
        path = suites / f"{name}.parquet"
        if name == VALIDATION and not path.is_file():
            path = suites.parent / VALIDATION_FILE
        if not path.is_file():
            raise DataError(f"{path}: is not there, and the grader needs the questions; prepare the data again")
        found |= {(name, prompt.uid): problem_of(prompt) for prompt in read_prompts(path)}
    return found


def regrade(
    folder: Path,
    evaluation: FinishedEvaluation,
    suites: Sequence[str],
    problems: Mapping[tuple[str, str], Problem],
    kind: GraderKind,
    grader: GraderPool,
    write_pages: WritePages,
) -> list[Regraded]:
    """Grade the responses of `suites` again; write to `folder` what an evaluation with that `kind` would have written.

    A problem that is not among `problems` is graded without its question and options. Returns the changes for each
    suite and decoding, in the order of the results.
    """
    changed: dict[Cell, list[Verdicts]] = {}

    def asked() -> Iterator[tuple[SampleRecord, GradeRequest]]:
        for record in evaluation.records():
            if record.suite in suites:
                problem = problems.get((record.suite, record.uid), Problem())
                yield (
                    record,
                    GradeRequest(
                        record.graded_text,
                        record.ground_truth,
                        replace(problem, in_tag=asks_for_tag(record.prompt)),
                        kind,
                        {TOKENS: record.num_tokens, **record.measures},
                        record.has_failed,
                    ),
                )

    def counted() -> Iterator[SampleRecord]:
        kept = "no file is written, verdicts are kept, and the same command asks for the others"
        for old, new in _graded(asked(), grader, kept):
            if old.correct != new.correct:
                # Responses may be long, and many.
                without_texts = replace(old, prompt="", response=""), replace(new, prompt="", response="")
                changed.setdefault((new.suite, new.decoding), []).append(without_texts)
            yield new

    folder.mkdir(parents=True, exist_ok=True)
    write_sample_records(folder / SAMPLES_FILE, counted())
    results = evaluation.results
    before = {(row.suite, row.decoding): row for row in results.rows}
    protocols = {cell: row.protocol for cell, row in before.items() if row.protocol is not None}
    after = write_counted(folder, results.checkpoint, results.confidence, protocols, write_pages).rows
    cells = ((row.suite, row.decoding) for row in after)
    return [Regraded(before[cell], row, tuple(changed.get(cell, ()))) for cell, row in zip(cells, after, strict=True)]


def _graded(
    asked: Iterable[tuple[SampleRecord, GradeRequest]], grader: GraderPool, consequence: str
) -> Iterator[Verdicts]:
    """Yield each record with its grade of before, and with the one that `grader` gives on request.

    Raises LostError, which ends with the `consequence`, where a judge could not be reached.
    """
    waiting = iter(asked)
    while batch := list(itertools.islice(waiting, _BATCH)):
        grades = grader.grade([request for _, request in batch])
        require_verdicts(grades, "responses", consequence)
        for (record, request), grade in zip(batch, grades, strict=True):
            yield record, record.graded(grader.kind_of(request).kind, grade)

"""Responses that another system has sampled, as files of it hold them, graded as an evaluation is.

    problems = read_responses([Path("responses.parquet")], grading)
    results = write_responses(folder, "their model", problems, config, grading, pool, write_summaries)

verl's `main_eval` and LUFFY's `generate_vllm.py` write a row for a problem or a response, verl's trainer the columns
`input`, `output` and `gts` (`rollout_data_dir`).
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from luffy.config.evaluation import EvaluationConfig
from luffy.config.grading import GradingConfig
from luffy.data.schema import RowError, prompt_from_row, value_at
from luffy.data.sources.stored_rows import READERS
from luffy.data.templates import opener_of
from luffy.errors import DataError
from luffy.evaluation.results import EvaluationResults, write_counted
from luffy.evaluation.sample_files import SAMPLES_FILE, SampleRecord, ungraded_record, write_sample_records
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, problem_of, require_verdicts
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
_MAX_LABEL = 100
"""Longer texts beside a response are no subject or level."""


@dataclass(slots=True)
class AnsweredProblem:
    """A problem with the responses to it, in the order of the files."""

    prompt: Prompt
    text: str
    """The prompt as the model saw it, where the file has it as one text; else the turns."""
    is_rendered: bool
    place: str
    """File and row."""
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
            known = suites.setdefault(problem.prompt.data_source, {}).setdefault(problem.prompt.uid, problem)
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
    labels = {name: value for name, value in row.items() if _is_label(value)}
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
    return AnsweredProblem(read, shown, is_rendered, place, responses)


def _is_label(value: object) -> bool:
    return isinstance(value, int) or (isinstance(value, str) and len(value) <= _MAX_LABEL)


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
    grading: GradingConfig,
    grader: GraderPool,
    write_pages: Callable[[Path, EvaluationResults], None],
) -> EvaluationResults:
    """Grade all responses and write to `folder` what an evaluation of `model` has: samples, results and pages.

    A suite's grader is that of `config`, as far as it has one, else that of the row or of `grading`. Numbers of tokens
    and the ends of responses are unknown: 0 and "".
    """

    def records() -> Iterator[SampleRecord]:
        responses = ((problem, number) for problem in problems for number in range(len(problem.responses)))
        while batch := list(itertools.islice(responses, _BATCH)):
            requests = [
                GradeRequest(
                    problem.responses[number],
                    problem.prompt.ground_truth,
                    problem_of(problem.prompt, problem.text if problem.is_rendered else ""),
                    config.protocol(problem.prompt.data_source, next(iter(config.decodings))).grader,
                )
                for problem, number in batch
            ]
            grades = grader.grade(requests)
            require_verdicts(grades, "responses", "nothing is written; repeat the command")
            for (problem, number), request, grade in zip(batch, requests, grades, strict=True):
                record = ungraded_record(
                    problem.prompt, suite=problem.prompt.data_source, decoding=DECODING, sample=number, seed=0,
                    shown=problem.text, response=problem.responses[number], finish_reason="", num_tokens=0,
                )  # fmt: skip
                yield record.graded(grader.kind_of(request).kind, grade)

    folder.mkdir(parents=True, exist_ok=True)
    write_sample_records(folder / SAMPLES_FILE, records())
    return write_counted(folder, model, config.confidence, {}, write_pages)

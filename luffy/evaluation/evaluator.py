"""The evaluator: generates the responses to one suite under one decoding, grades them, and records both."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from luffy.confidential import may_show_prompt
from luffy.config.environment import EpisodeLimits
from luffy.config.evaluation import EvaluationConfig
from luffy.data.prompt_templates import stops_of
from luffy.environments.limits import FailedShare
from luffy.errors import DataError
from luffy.evaluation.model_clients import ModelClient
from luffy.evaluation.requests import EvaluationRequest, Response, SampleRequest, Suite, batching_order, positions
from luffy.evaluation.results import SamplingProtocol
from luffy.evaluation.sample_log import SampleLog
from luffy.evaluation.sample_records import SampleRecord
from luffy.evaluation.second_grades import grade_responses
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, problem_of, require_verdicts
from luffy.stop_request import check_stop_request
from luffy.types import FinishReason, Prompt

Progress = Callable[[Sequence[SampleRecord]], None]
"""Called with each graded batch."""
_REGRADING_BATCH = 1024
_SUBJECTS = ("subject", "subfield", "category", "High-level domain", "course")
_LEVELS = ("level", "difficulty")
"""Keys of a problem's subject or level in `extra_info`, which differ between data sets."""


_WAITING_CALLS = 2
"""Calls of the model that are requested at the same time, for each that can run: with one more, no engine waits for the
batches before it to be graded."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A suite under a decoding, and what is left of its responses."""

    request: EvaluationRequest
    order: Sequence[int]
    """Positions of all responses, in the order of generation (`batching_order`)."""
    left: Sequence[SampleRequest]
    """Responses to generate, in that order."""
    log: SampleLog | None = None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Responses of a cell that are generated in one call."""

    cell: _Cell
    samples: Sequence[SampleRequest]
    """Empty for a cell with nothing left."""
    is_last: bool


class Evaluator:
    """Evaluates one model.

    `batch_size` responses are generated at a time, and graded while the next batch is generated; math responses get a
    second grade, too, unless `second_grade` is false. `calls_at_once` is the number of batches that the model can
    generate at the same time; the batches themselves, and the order of all results, do not depend on it. With `limits`,
    those of an environment, EnvironmentFault is raised when the environment fails in too many episodes of a suite; the
    batch with which it does is not kept.

    After a request to end (`luffy.stop_request`) no further batch is generated, and StoppedOnRequest is raised once
    those under way are graded; an evaluation that `is_whole` goes on to its end, since it is part of a training step.
    """

    def __init__(
        self,
        client: ModelClient,
        grader: GraderPool,
        config: EvaluationConfig,
        seed: int,
        batch_size: int,
        *,
        calls_at_once: int = 1,
        second_grade: bool = True,
        is_whole: bool = False,
        limits: EpisodeLimits | None = None,
    ) -> None:
        self._client = client
        self._grader = grader
        self._config = config
        self._seed = seed
        self._batch_size = batch_size
        self._calls_at_once = calls_at_once
        self._second_grade = second_grade
        self._is_whole = is_whole
        self._limits = limits
        self._failures: dict[tuple[str, str], FailedShare] = {}
        """By suite and decoding."""

    def evaluate(self, cells: Iterable[tuple[Suite, str]], progress: Progress) -> Iterator[list[SampleRecord]]:
        """For each suite and decoding, all graded responses, problem by problem."""
        records: list[SampleRecord] = []
        for batch, graded in self._graded(self._begin(suite, decoding) for suite, decoding in cells):
            if graded:
                records += graded
                progress(graded)
            if batch.is_last:
                yield [records[position] for position in positions(batch.cell.order)]
                records = []

    def evaluate_into(
        self, cells: Iterable[tuple[SampleLog, Suite, str]], progress: Progress
    ) -> Iterator[Iterator[SampleRecord]]:
        """As `evaluate`, but through files: all responses of a cell are graded, and then read one by one.

        Each graded batch is appended to the cell's log. Batches that an earlier attempt left there are not generated
        again, nor passed to `progress`. If the engine fails, everything it generated before stays in the log.
        """
        for batch, graded in self._graded(self._resume(log, suite, decoding) for log, suite, decoding in cells):
            log = batch.cell.log
            assert log is not None
            if graded:
                log.append(graded)
                progress(graded)
            if batch.is_last:
                yield log.read(positions(batch.cell.order))

    def _begin(self, suite: Suite, decoding: str) -> _Cell:
        request = EvaluationRequest(suite, decoding, self._config, self._client.render, self._seed)
        samples = request.samples()
        order = batching_order(samples)
        return _Cell(request, order, [samples[i] for i in order])

    def _resume(self, log: SampleLog, suite: Suite, decoding: str) -> _Cell:
        cell = self._begin(suite, decoding)
        kept = log.resume([sample.key for sample in cell.left], self._batch_size)
        if kept and self._limits is not None:
            self._count_failures(cell.request, [record.has_failed for record in log.read(range(kept))])
        return _Cell(cell.request, cell.order, cell.left[kept:], log)

    def _graded(self, cells: Iterable[_Cell]) -> Iterator[tuple[_Batch, list[SampleRecord]]]:
        """All batches in order, each with its records; the next ones are generated meanwhile."""
        grading = ThreadPoolExecutor(1, thread_name_prefix="evaluate")
        waiting: tuple[_Batch, Future[list[SampleRecord]]] | None = None
        try:
            for batch, responses in self._generated(cells):
                if waiting is not None:
                    yield waiting[0], waiting[1].result()
                waiting = batch, grading.submit(self._grade, batch, responses)
        except Exception:  # an engine may raise anything; the batch that it generated before is not lost
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            raise
        finally:
            # An interrupt does not wait: closing the grader pool ends the thread, too.
            grading.shutdown(wait=False)
        if waiting is not None:
            yield waiting[0], waiting[1].result()

    def _generated(self, cells: Iterable[_Cell]) -> Iterator[tuple[_Batch, Iterable[Response]]]:
        """All batches in order, each with its responses; calls of the model that run at once are some batches ahead."""
        batches = (batch for cell in cells for batch in self._batches(cell))
        if self._calls_at_once == 1:
            yield from ((batch, self._generate(batch)) for batch in batches)
            return
        ahead: deque[tuple[_Batch, Future[Iterable[Response]]]] = deque()
        calls = ThreadPoolExecutor(self._calls_at_once, thread_name_prefix="generate")
        try:
            for batch in batches:
                ahead.append((batch, calls.submit(self._generate, batch)))
                if len(ahead) > _WAITING_CALLS * self._calls_at_once:
                    first, responses = ahead.popleft()
                    yield first, responses.result()
            while ahead:
                first, responses = ahead.popleft()
                yield first, responses.result()
        finally:
            # Nor is a call waited for: closing the engine ends it.
            calls.shutdown(wait=False, cancel_futures=True)

    def _batches(self, cell: _Cell) -> Iterator[_Batch]:
        size, number = self._batch_size, len(cell.left)
        for start in range(0, max(number, 1), size):
            yield _Batch(cell, cell.left[start : start + size], is_last=start + size >= number)

    def _generate(self, batch: _Batch) -> Iterable[Response]:
        if not batch.samples:
            return ()
        if not self._is_whole:
            check_stop_request("all finished responses are kept")
        request = batch.cell.request
        return self._client.generate(batch.samples, request.protocol, request.max_response_tokens)

    def _grade(self, batch: _Batch, responses: Iterable[Response]) -> list[SampleRecord]:
        if not batch.samples:
            return []
        request, found = batch.cell.request, list(responses)
        self._count_failures(request, [response.has_failed for response in found])
        return _graded(self._grader, request, batch.samples, found, second=self._second_grade)

    def _count_failures(self, request: EvaluationRequest, failed: Sequence[bool]) -> None:
        if self._limits is not None:
            share = self._failures.setdefault((request.suite, request.decoding), FailedShare(self._limits))
            share.add(failed)


def grade_sampled(
    request: EvaluationRequest, sampled: Iterable[SampleRecord], grader: GraderPool, progress: Progress
) -> Iterator[SampleRecord]:
    """Grade responses that were `sampled` before for an equal request; yields their records, problem by problem.

    Raises DataError where `sampled` are not the responses to this request.
    """
    left, samples = iter(sampled), request.samples()
    for start in range(0, len(samples), _REGRADING_BATCH):
        batch = samples[start : start + _REGRADING_BATCH]
        records = [next(left, None) for _ in batch]
        responses = [_response_in(record, sample) for sample, record in zip(batch, records, strict=True)]
        graded = _graded(grader, request, batch, responses)
        progress(graded)
        yield from graded


def protocol_of(config: EvaluationConfig, suite: str, decoding: str) -> SamplingProtocol:
    """How responses to the suite are sampled under the decoding, as results record it."""
    protocol = config.protocol(suite, decoding)
    return SamplingProtocol(
        template=protocol.template,
        temperature=protocol.temperature,
        top_p=protocol.top_p,
        max_response_tokens=config.max_response_tokens,
        stop=(*stops_of(protocol.template), *protocol.stop),
        engine=config.engine,
    )


def _response_in(record: SampleRecord | None, sample: SampleRequest) -> Response:
    if record is None or (record.uid, record.sample, record.seed, record.prompt) != (*sample.key, sample.rendered.text):
        raise DataError(f"no response to sample {sample.sample} of problem {sample.prompt.uid}")
    return Response(
        record.response, record.num_tokens, FinishReason(record.finish_reason), record.reply, record.measures
    )


def _graded(
    grader: GraderPool,
    request: EvaluationRequest,
    samples: Sequence[SampleRequest],
    responses: Sequence[Response],
    *,
    second: bool = True,
) -> list[SampleRecord]:
    requests = [
        GradeRequest(
            response.graded_text,
            sample.prompt.ground_truth,
            problem_of(sample.prompt),
            request.protocol.grader,
            response.measures,
            response.has_failed,
        )
        for sample, response in zip(samples, responses, strict=True)
    ]
    grades = grade_responses(grader, requests, second=second)
    require_verdicts(
        [both.grade for both in grades],
        "responses",
        "graded responses are kept, and the same command continues after them",
    )
    return [
        both.added_to(_record(request, sample, response))
        for sample, response, both in zip(samples, responses, grades, strict=True)
    ]


def _record(request: EvaluationRequest, sample: SampleRequest, response: Response) -> SampleRecord:
    """The record before grading."""
    prompt = sample.prompt
    num_options = prompt.extra_info.get("num_options") or len(problem_of(prompt).options)
    return SampleRecord(
        suite=request.suite,
        decoding=request.decoding,
        uid=prompt.uid,
        sample=sample.sample,
        seed=sample.seed,
        prompt=sample.rendered.text,
        response=response.text,
        answer=None,
        ground_truth=prompt.ground_truth,
        outcome="",
        reason="",
        correct=False,
        finish_reason=response.finish_reason.value,
        num_tokens=response.num_tokens,
        subject=_label(prompt, _SUBJECTS),
        level=_label(prompt, _LEVELS),
        num_options=num_options if isinstance(num_options, int) and num_options else None,
        confidential=not may_show_prompt(prompt),
        reply=response.reply,
        measures=dict(response.measures),
    )


def _label(prompt: Prompt, names: Sequence[str]) -> str | None:
    found = (prompt.extra_info.get(name) for name in names)
    return next((str(value) for value in found if isinstance(value, str | int) and value != ""), None)

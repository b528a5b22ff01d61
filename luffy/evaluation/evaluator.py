"""The evaluator: generates the responses to one suite under one decoding, grades them, and records both."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from luffy.confidential import may_show_prompt
from luffy.config.evaluation import EvaluationConfig
from luffy.data.prompt_templates import stops_of
from luffy.errors import DataError, LostError
from luffy.evaluation.model_clients import ModelClient
from luffy.evaluation.requests import EvaluationRequest, Response, SampleRequest, Suite, batching_order, positions
from luffy.evaluation.results import SamplingProtocol
from luffy.evaluation.sample_log import SampleLog
from luffy.evaluation.sample_records import SampleRecord
from luffy.evaluation.second_grades import ResponseGrades, grade_responses
from luffy.grading import GradeRequest, GraderPool, is_unjudged, problem_of
from luffy.types import FinishReason, Prompt

Progress = Callable[[Sequence[SampleRecord]], None]
"""Called with each graded batch."""
_REGRADING_BATCH = 1024
_SUBJECTS = ("subject", "subfield", "category", "High-level domain", "course")
_LEVELS = ("level", "difficulty")
"""Names that data sets give them in `extra_info`."""


class Evaluator:
    """Evaluates one model.

    `batch_size` responses are generated at a time, and graded while the next batch is generated; math responses get a
    second grade, too, unless `second_grade` is false.
    """

    def __init__(
        self,
        client: ModelClient,
        grader: GraderPool,
        config: EvaluationConfig,
        seed: int,
        batch_size: int,
        *,
        second_grade: bool = True,
    ) -> None:
        self._client = client
        self._grader = grader
        self._config = config
        self._seed = seed
        self._batch_size = batch_size
        self._second_grade = second_grade

    def evaluate(self, suite: Suite, decoding: str, progress: Progress) -> list[SampleRecord]:
        """All graded responses to `suite` under the decoding of that name, problem by problem."""
        request = self._request(suite, decoding)
        samples = request.samples()
        order = batching_order(samples)
        records: list[SampleRecord] = []
        for batch in self._graded_batches([samples[i] for i in order], request):
            records += batch
            progress(batch)
        return [records[position] for position in positions(order)]

    def evaluate_into(self, log: SampleLog, suite: Suite, decoding: str, progress: Progress) -> Iterator[SampleRecord]:
        """As `evaluate`, but through a file: everything is graded when this returns, and then read one by one.

        Each graded batch is appended to `log`. Batches that an earlier attempt left there are not generated again, nor
        passed to `progress`. If the engine fails, everything it generated before stays in `log`.
        """
        request = self._request(suite, decoding)
        samples = request.samples()
        order = batching_order(samples)
        kept = log.resume([samples[i].key for i in order], self._batch_size)
        for batch in self._graded_batches([samples[i] for i in order[kept:]], request):
            log.append(batch)
            progress(batch)
        return log.read(positions(order))

    def _request(self, suite: Suite, decoding: str) -> EvaluationRequest:
        return EvaluationRequest(suite, decoding, self._config, self._client.render, self._seed)

    def _graded_batches(
        self, samples: Sequence[SampleRequest], request: EvaluationRequest
    ) -> Iterator[list[SampleRecord]]:
        grading = ThreadPoolExecutor(1, thread_name_prefix="evaluate")
        waiting: Future[list[SampleRecord]] | None = None
        try:
            for start in range(0, len(samples), self._batch_size):
                batch = samples[start : start + self._batch_size]
                responses = self._generate(batch, request)
                if waiting is not None:
                    yield waiting.result()
                waiting = grading.submit(self._graded, batch, responses, request)
        except Exception:  # an engine may raise anything; the batch that it generated before is not lost
            if waiting is not None:
                yield waiting.result()
            raise
        finally:
            # An interrupt does not wait: closing the grader pool ends the thread, too.
            grading.shutdown(wait=False)
        if waiting is not None:
            yield waiting.result()

    def _generate(self, samples: Sequence[SampleRequest], request: EvaluationRequest) -> Iterable[Response]:
        return self._client.generate(samples, request.protocol, request.max_response_tokens)

    def _graded(
        self, samples: Sequence[SampleRequest], responses: Iterable[Response], request: EvaluationRequest
    ) -> list[SampleRecord]:
        return _graded(self._grader, request, samples, list(responses), second=self._second_grade)


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
            response.graded_measures,
        )
        for sample, response in zip(samples, responses, strict=True)
    ]
    grades = grade_responses(grader, requests, second=second)
    _require_verdicts(grades)
    return [
        both.added_to(_record(request, sample, response))
        for sample, response, both in zip(samples, responses, grades, strict=True)
    ]


def _require_verdicts(grades: Sequence[ResponseGrades]) -> None:
    """Raise LostError where the judge could not be reached, which says nothing about the responses."""
    lost = [both.grade for both in grades if is_unjudged(both.grade)]
    if lost:
        raise LostError(
            f"{len(lost)} of {len(grades)} responses have no verdict ({lost[0].reason}); graded "
            "responses are kept, and the same command continues after them"
        )


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

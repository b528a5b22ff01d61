"""The loop of every stage that asks a model: generate a batch, grade it while the next is generated, and keep it.

    asker = Asker(client, grader, batch_size)
    asker.ask(requests, store, progress.add)         # only what the store does not have
    for record in graded_records(request, store): ...

A kill costs no more than the batches under way.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Generator as Iterating
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

from luffy.confidential import may_show_prompt
from luffy.config.environment import EpisodeLimits
from luffy.config.grading import GraderKind
from luffy.config.settings import DifficultySettings, EvaluateSettings, SampleSettings
from luffy.data.templates import load_tokenizer
from luffy.environments.limits import FailedShare
from luffy.evaluation.sample_files import SampleRecord
from luffy.evaluation.second_grades import grade_responses
from luffy.grading.judge import Judges
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.grading.request import GradeRequest, problem_of, require_verdicts
from luffy.stages.answers.clients import Generator, ModelClient, open_client, open_generator
from luffy.stages.answers.requests import EvaluationRequest, SampleRequest
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.stages.program import StageContext
from luffy.stop_request import check_stop_request
from luffy.types import Outcome, Prompt

Keep: TypeAlias = Callable[[SampleRequest, ModelAnswer], ModelAnswer]
"""What of a graded answer is stored."""
Progress: TypeAlias = Callable[[Sequence[ModelAnswer]], None]
"""Called with each graded batch."""
_Batch: TypeAlias = tuple[EvaluationRequest, Sequence[SampleRequest]]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_SUBJECTS = ("subject", "subfield", "category", "High-level domain", "course")
_LEVELS = ("level", "difficulty")
"""Keys of a problem's subject or level in `extra_info`, which differ between data sets."""
_WAITING_CALLS = 2
"""Calls of the model that are requested at the same time, for each that can run: with one more, no engine waits for the
batches before it to be graded."""


class Asker:
    """Asks one model.

    `batch_size` answers are generated at a time, and graded while the next batch is generated; math responses get a
    second grade, too, unless `second_grade` is false. `calls_at_once` is the number of batches that the model can
    generate at the same time; the batches themselves, and the order of all results, do not depend on it. With `limits`,
    those of an environment, EnvironmentFault is raised when the environment fails in too many episodes of a suite; the
    batch with which it does is not kept. `keep` decides what of a graded answer is stored.

    After a request to end (`luffy.stop_request`) no further batch is generated, and StoppedOnRequest is raised once
    those under way are graded. An asker that `finishes` goes on to its end, since it is part of a training step.
    """

    def __init__(
        self,
        client: ModelClient,
        grader: GraderPool,
        batch_size: int,
        *,
        calls_at_once: int = 1,
        second_grade: bool = True,
        finishes: bool = False,
        limits: EpisodeLimits | None = None,
        keep: Keep = lambda sample, answer: answer,
    ) -> None:
        self._client = client
        self._grader = grader
        self._batch_size = batch_size
        self._calls_at_once = calls_at_once
        self._second_grade = second_grade
        self._finishes = finishes
        self._limits = limits
        self._keep = keep
        self._failures: dict[tuple[str, str], FailedShare] = {}
        """By suite and decoding."""

    def ask(self, requests: Iterable[EvaluationRequest], store: AnswerStore, progress: Progress) -> None:
        """Add the graded answers that the store lacks, batch by batch; only these go to `progress`.

        If the engine fails, everything that it generated before is stored.
        """
        batches = (batch for request in requests for batch in self._left(request, store))
        threads = 0 if self._calls_at_once == 1 else self._calls_at_once
        with (
            closing(in_order(self._generate, batches, threads, _WAITING_CALLS * threads)) as generated,
            closing(in_order(self._graded, generated, threads=1, ahead=1)) as results,
        ):
            for ((_, samples), _), answers in results:
                kept = map(self._keep, samples, answers)
                store.add({sample.key: answer for sample, answer in zip(samples, kept, strict=True)})
                progress(answers)

    def _left(self, request: EvaluationRequest, store: AnswerStore) -> Iterator[_Batch]:
        samples = request.in_batching_order()
        left = [sample for sample in samples if sample.key not in store]
        if self._limits is not None:
            known = [store[sample.key].has_failed for sample in samples if sample.key in store]
            self._count_failures(request, known)
        for start in range(0, len(left), self._batch_size):
            yield request, left[start : start + self._batch_size]

    def _generate(self, batch: _Batch) -> Iterable[ModelAnswer]:
        request, samples = batch
        if not self._finishes:
            check_stop_request("all finished responses are kept")
        return self._client.generate(samples, request.protocol, request.max_response_tokens)

    def _graded(self, generated: tuple[_Batch, Iterable[ModelAnswer]]) -> list[ModelAnswer]:
        (request, samples), answers = generated[0], list(generated[1])
        self._count_failures(request, [answer.has_failed for answer in answers])
        return graded(self._grader, request, samples, answers, second=self._second_grade)

    def _count_failures(self, request: EvaluationRequest, failed: Sequence[bool]) -> None:
        if self._limits is not None and failed:
            share = self._failures.setdefault((request.suite, request.decoding), FailedShare(self._limits))
            share.add(failed)


@contextmanager
def open_asker(
    engine: str,
    settings: EvaluateSettings | SampleSettings | DifficultySettings,
    context: StageContext,
    longest: int,
    *,
    own_graders: Sequence[GraderKind] = (),
    second_grade: bool = True,
    for_traces: bool = False,
    keep: Keep = lambda sample, answer: answer,
) -> Iterator[tuple[Asker, Generator]]:
    """An asker of the stage's model, by the engine of that name, and the opened engine.

    `longest` is the largest number of tokens of a prompt with its response; `own_graders` are those of single suites;
    `for_traces` as in `open_client`.
    """
    model, environment, cache = context.inputs["model"] / "model", settings.environment, context.out / JUDGE_CACHE
    generator = open_generator(engine, model, settings.dtype, longest, context)
    try:
        pool = GraderPool.configured(context.execution.grader_workers, settings.grading, cache, own_graders)
        with pool as grader, closing(Judges(cache)) as judges:
            tokenizer = load_tokenizer(model)
            client = open_client(
                environment, generator.engine, tokenizer, generator.lanes, judges, for_traces=for_traces
            )
            asker = Asker(
                client,
                grader,
                generator.batch_size,
                calls_at_once=generator.calls_at_once,
                second_grade=second_grade,
                limits=None if environment is None else environment.limits,
                keep=keep,
            )
            yield asker, generator
    finally:
        generator.engine.close()


def in_order(
    function: Callable[[_Item], _Result], items: Iterable[_Item], threads: int, ahead: int
) -> Iterating[tuple[_Item, _Result]]:
    """Each item with `function(item)`, which runs in `threads` threads, up to `ahead` items before they are asked for.

    Without threads it runs in the caller's. Where `items` raise, what is under way comes first. Where the caller ends,
    nothing is waited for: closing the engine or the graders ends what still runs.
    """
    if not threads:
        yield from ((item, function(item)) for item in items)
        return
    source = iter(items)
    failure: Exception | None = None
    waiting: deque[tuple[_Item, Future[_Result]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="answers")
    try:
        while failure is None:
            try:
                item = next(source)
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001 - an engine may raise anything; what it generated before is kept
                failure = error
                break
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > ahead:
                first, result = waiting.popleft()
                yield first, result.result()
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if failure is not None:
        raise failure


def graded(
    grader: GraderPool,
    request: EvaluationRequest,
    samples: Sequence[SampleRequest],
    answers: Sequence[ModelAnswer],
    *,
    second: bool = True,
) -> list[ModelAnswer]:
    """The answers with their grades; LostError where a judge is gone."""
    requests = [
        GradeRequest(
            answer.graded_text,
            sample.prompt.ground_truth,
            problem_of(sample.prompt),
            request.protocol.grader,
            answer.measures,
            answer.has_failed,
        )
        for sample, answer in zip(samples, answers, strict=True)
    ]
    grades = grade_responses(grader, requests, second=second)
    require_verdicts(
        [both.grade for both in grades],
        "responses",
        "graded responses are kept, and the same command continues after them",
    )
    return [replace(answer, grades=both) for answer, both in zip(answers, grades, strict=True)]


def graded_records(request: EvaluationRequest, store: AnswerStore) -> Iterator[SampleRecord]:
    """All graded responses of a request, problem by problem, one at a time from the store."""
    for sample in request.samples:
        answer, prompt = store[sample.key], sample.prompt
        num_options = prompt.extra_info.get("num_options") or len(problem_of(prompt).options)
        assert answer.text is not None and answer.grades is not None
        yield answer.grades.added_to(
            SampleRecord(
                suite=request.suite,
                decoding=request.decoding,
                uid=prompt.uid,
                sample=sample.sample,
                seed=sample.seed,
                prompt=sample.rendered.text,
                response=answer.text,
                answer=None,
                ground_truth=prompt.ground_truth,
                outcome="",
                reason="",
                correct=False,
                finish_reason=answer.finish_reason.value,
                num_tokens=answer.num_tokens,
                subject=_label(prompt, _SUBJECTS),
                level=_label(prompt, _LEVELS),
                num_options=num_options if isinstance(num_options, int) and num_options else None,
                confidential=not may_show_prompt(prompt),
                reply=answer.reply,
                measures=dict(answer.measures),
            )
        )


def _label(prompt: Prompt, names: Sequence[str]) -> str | None:
    found = (prompt.extra_info.get(name) for name in names)
    return next((str(value) for value in found if isinstance(value, str | int) and value != ""), None)


@dataclass(slots=True)
class ResponseProgress:
    """Counts the responses of this attempt and reports them to the supervisor."""

    context: StageContext
    total: int
    done: int
    correct: int = 0
    graded: int = 0
    tokens: int = 0
    began: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        """The engine is ready: its speed is counted from here."""
        self.began, self.tokens = time.perf_counter(), 0
        self.context.events.progress(self.done, self.total)

    def add(self, batch: Sequence[ModelAnswer]) -> None:
        """Count a batch that was generated and graded."""
        self.tokens += sum(answer.num_tokens for answer in batch)
        self.add_adopted(batch)

    def add_adopted(self, batch: Sequence[ModelAnswer]) -> None:
        """Count a graded batch that an earlier evaluation generated."""
        self.done += len(batch)
        self.graded += len(batch)
        self.correct += sum(answer.outcome is Outcome.CORRECT for answer in batch)
        speed = self.tokens / max(time.perf_counter() - self.began, 1e-9)
        self.context.events.progress(self.done, self.total, reward=self.correct / self.graded, tokens_per_s=speed)

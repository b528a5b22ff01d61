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
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TypeAlias, TypeVar

from transformers import PreTrainedTokenizerBase

from luffy.config.environment import EpisodeLimits
from luffy.config.evaluation import EvaluationConfig
from luffy.config.grading import GradingConfig
from luffy.config.model import DType
from luffy.config.settings import DifficultySettings, EvaluateSettings, SampleSettings
from luffy.data.templates import load_tokenizer
from luffy.environments.limits import FailedShare
from luffy.evaluation.sample_files import SampleRecord, ungraded_record
from luffy.grading.judge import Judges
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.grading.request import TOKENS, GradeRequest, problem_of, require_verdicts
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.stages.answers.clients import Generator, ModelClient, Questions, SampleRequest, open_client, open_generator
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.stages.program import StageContext
from luffy.stop_request import check_stop_request
from luffy.types import Outcome

Keep: TypeAlias = Callable[[SampleRequest, ModelAnswer], ModelAnswer | None]
"""What of an answer is stored; None: nothing."""
Progress: TypeAlias = Callable[[Sequence[ModelAnswer]], None]
"""Called with each graded batch."""
_Settings: TypeAlias = EvaluateSettings | SampleSettings | DifficultySettings
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_WAITING_CALLS = 2
"""Calls of the model that are requested at the same time, for each that can run: with one more, no engine waits for the
batches before it to be graded."""


@dataclass(slots=True)
class Asker:
    """Asks one model.

    After a request to end (`luffy.stop_request`) no further batch is generated, and StoppedOnRequest is raised once
    those under way are graded.
    """

    client: ModelClient
    grader: GraderPool
    batch_size: int
    """Answers are generated so many at a time, and graded while the next batch is generated."""
    _: KW_ONLY
    calls_at_once: int = 1
    """Batches that the model can generate at the same time; they, and the order of results, do not depend on it."""
    finishes: bool = False
    """It goes on to its end after a request to end, since it is part of a training step."""
    limits: EpisodeLimits | None = None
    """Those of an environment: EnvironmentFault is raised when it fails in too many episodes of a suite; the batch with
    which it does is not kept."""
    keep: Keep = lambda sample, answer: answer
    failures: dict[tuple[str, str], FailedShare] = field(default_factory=dict, init=False)
    """By suite and decoding."""

    def ask(self, requests: Iterable[Questions], store: AnswerStore, progress: Progress) -> None:
        """Add the answers that the store lacks, batch by batch; only these go to `progress`.

        If the engine fails, everything that it generated before is stored.
        """
        batches = (batch for request in requests for batch in self._left(request, store))
        threads = 0 if self.calls_at_once == 1 else self.calls_at_once
        with (
            closing(in_order(self._generate, batches, threads, _WAITING_CALLS * threads)) as generated,
            closing(in_order(self._graded, generated, 1, ahead=1)) as results,
        ):
            for (batch, _), answers in results:
                kept = zip(batch.samples, map(self.keep, batch.samples, answers), strict=True)
                store.add((sample.key, answer) for sample, answer in kept if answer is not None)
                progress(answers)

    def _left(self, request: Questions, store: AnswerStore) -> Iterator[Questions]:
        # Prompts of similar length share a batch, to save padding.
        samples = sorted(request.samples, key=lambda sample: len(sample.rendered.ids) or len(sample.rendered.text))
        if self.limits is not None:
            known = [store[sample.key].has_failed for sample in samples if sample.key in store]
            self._count_failures(request, known)
        left = [sample for sample in samples if sample.key not in store]
        for start in range(0, len(left), self.batch_size):
            yield replace(request, samples=left[start : start + self.batch_size])

    def _generate(self, batch: Questions) -> Iterable[ModelAnswer]:
        if not self.finishes:
            check_stop_request("all finished responses are kept")
        return self.client.generate(batch)

    def _graded(self, generated: tuple[Questions, Iterable[ModelAnswer]]) -> list[ModelAnswer]:
        batch, answers = generated[0], list(generated[1])
        self._count_failures(batch, [answer.has_failed for answer in answers])
        return graded(self.grader, batch, answers)

    def _count_failures(self, request: Questions, failed: Sequence[bool]) -> None:
        if self.limits is not None and failed:
            share = self.failures.setdefault((request.suite, request.decoding), FailedShare(self.limits))
            share.add(failed)


@dataclass(frozen=True, slots=True)
class ModelToAsk:
    """A model folder with its tokenizer."""

    folder: Path
    tokenizer: PreTrainedTokenizerBase
    dtype: DType | None = None
    """None: that of the stage."""
    policy: PreTrainedTokenizerBase | None = None
    """As in `open_client`."""


@contextmanager
def open_graders(
    grading: GradingConfig, context: StageContext, own: EvaluationConfig | None = None
) -> Iterator[tuple[GraderPool, Judges]]:
    """The stage's graders, with those that suites set for themselves in `own`, and the judges of its episodes."""
    cache, of_suites = context.out / JUDGE_CACHE, () if own is None else own.own_graders
    with (
        GraderPool.configured(context.execution, grading, cache, of_suites) as grader,
        closing(Judges(cache)) as judges,
    ):
        yield grader, judges


@contextmanager
def open_asker(
    settings: _Settings,
    engine: str,
    context: StageContext,
    longest: int,
    progress: "ResponseProgress",
    num_left: int,
    model: ModelToAsk | None = None,
    keep: Keep = lambda sample, answer: answer,
) -> Iterator[tuple[Asker, Generator]]:
    """An asker of the stage's model, or of another, by the engine of that name, and the opened engine.

    `longest` is the largest number of tokens of a prompt with its response, `num_left` what is left to sample.
    `progress` hears of vLLM's single turns while a call runs.
    """
    environment = settings.environment
    evaluation = settings.evaluation if isinstance(settings, EvaluateSettings) else None
    if model is None:
        folder = context.inputs["model"] / "model"
        model = ModelToAsk(folder, load_tokenizer(folder))
    generator = open_generator(engine, model.folder, model.dtype or settings.dtype, longest, num_left, context)
    with closing(generator.engine), open_graders(settings.grading, context, evaluation) as (grader, judges):
        if environment is None and isinstance(generator.engine, VLLMEngine):
            generator.engine.watch = progress.heard
        client_of = open_client(environment, model.tokenizer, generator.lanes, judges, model.policy)
        asker = Asker(
            client_of(generator.engine),
            grader,
            generator.batch_size,
            calls_at_once=generator.calls_at_once,
            limits=None if environment is None else environment.limits,
            keep=keep,
        )
        yield asker, generator


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
    failures: list[Exception] = []

    def until_failure() -> Iterator[_Item]:
        try:
            yield from items
        except Exception as error:  # noqa: BLE001 - an engine may raise anything; what it generated before is kept
            failures.append(error)

    waiting: deque[tuple[_Item, Future[_Result]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="answers")
    try:
        for item in until_failure():
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > ahead:
                first, result = waiting.popleft()
                yield first, result.result()
        for item, result in waiting:
            yield item, result.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    for failure in failures:
        raise failure


def graded(grader: GraderPool, batch: Questions, answers: Sequence[ModelAnswer]) -> list[ModelAnswer]:
    """The answers with their grades; LostError where a judge is gone."""
    requests = [
        GradeRequest(
            answer.graded_text,
            sample.prompt.ground_truth,
            problem_of(sample.prompt, sample.rendered.text),
            batch.protocol.grader,
            {TOKENS: answer.num_tokens, **answer.measures},
            answer.has_failed,
        )
        for sample, answer in zip(batch.samples, answers, strict=True)
    ]
    grades = grader.grade(requests)
    require_verdicts(grades, "responses", "graded responses are kept, and the same command continues after them")
    return [
        replace(answer, grade=grade, grader=grader.kind_of(request).kind)
        for answer, request, grade in zip(answers, requests, grades, strict=True)
    ]


def graded_records(request: Questions, store: AnswerStore) -> Iterator[SampleRecord]:
    """All graded responses of a request, problem by problem, one at a time from the store."""
    for sample in request.samples:
        answer = store[sample.key]
        assert answer.text is not None and answer.grade is not None
        yield ungraded_record(
            sample.prompt,
            sample.rendered.text,
            suite=request.suite,
            decoding=request.decoding,
            sample=sample.sample,
            seed=sample.seed,
            response=answer.text,
            finish_reason=answer.finish_reason.value,
            num_tokens=answer.num_tokens,
            reply=answer.reply,
            measures=dict(answer.measures),
        ).graded(answer.grader, answer.grade)


@dataclass(slots=True)
class ResponseProgress:
    """Counts the responses of this attempt and reports them to the supervisor."""

    context: StageContext
    total: int
    done: int
    correct: int = 0
    graded: int = 0
    tokens: int = 0
    under_way: int = 0
    """Responses that the engine has finished in calls that still run, or that are being graded."""
    is_heard: bool = False
    began: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        """The engine is ready: its speed is counted from here."""
        self.began, self.tokens = time.perf_counter(), 0
        self.context.events.progress(self.done, self.total)

    def heard(self, finished: int, tokens: int) -> None:
        """The engine has finished so many more responses, of so many tokens together."""
        self.is_heard = True
        self.under_way += finished
        self.tokens += tokens
        self._tell()

    def add(self, batch: Sequence[ModelAnswer]) -> None:
        """Count a batch that was generated and graded."""
        if self.is_heard:
            self.under_way -= len(batch)
        else:
            self.tokens += sum(answer.num_tokens for answer in batch)
        self.add_adopted(batch)

    def add_adopted(self, batch: Sequence[ModelAnswer]) -> None:
        """Count a graded batch that an earlier evaluation generated."""
        self.done += len(batch)
        self.graded += len(batch)
        self.correct += sum(answer.outcome is Outcome.CORRECT for answer in batch)
        self._tell()

    def _tell(self) -> None:
        metrics = {"reward": self.correct / self.graded} if self.graded else {}
        metrics["tokens_per_s"] = self.tokens / max(time.perf_counter() - self.began, 1e-9)
        self.context.events.progress(self.done + self.under_way, self.total, **metrics)

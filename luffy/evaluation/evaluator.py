"""One model, one suite, one decoding: ask, generate, grade, record."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import EvaluationConfig
from luffy.data.prompt_templates import OWN, ask, stops_of
from luffy.errors import DataError, LostError
from luffy.evaluation.model_clients import Respondent
from luffy.evaluation.requests import Inquiry, Response, Suite, Task, asking_order, places
from luffy.evaluation.results import Protocol
from luffy.evaluation.sample_log import SampleLog
from luffy.evaluation.sample_records import SampleRecord
from luffy.evaluation.second_grades import Opinions, opinions
from luffy.grading import GradeRequest, GraderPool, is_unjudged, problem_of
from luffy.types import FinishReason, Prompt

_Asked = TypeVar("_Asked")
Progress = Callable[[Sequence[SampleRecord]], None]
"""Is given each batch that is graded."""
_REGRADED_AT_ONCE = 1024
_SUBJECTS = ("subject", "subfield", "category", "High-level domain", "course")
_LEVELS = ("level", "difficulty")
"""What data sets call them in `extra_info`."""


class Evaluator:
    """Evaluates the model that is `respondent`; `batch_size` responses are generated at a time.

    A batch is graded while the next one is generated, on mathematics by a second grader, too (`second_opinion`).
    """

    def __init__(
        self,
        respondent: Respondent,
        grader: GraderPool,
        config: EvaluationConfig,
        seed: int,
        batch_size: int,
        *,
        second_opinion: bool = True,
    ) -> None:
        self._respondent = respondent
        self._grader = grader
        self._config = config
        self._seed = seed
        self._batch_size = batch_size
        self._second_opinion = second_opinion

    def evaluate(self, suite: Suite, decoding: str, progress: Progress) -> list[SampleRecord]:
        """All responses to `suite` under the decoding of that name, problem by problem."""
        inquiry = self._inquiry(suite, decoding)
        tasks = inquiry.tasks()
        order = asking_order(tasks)
        records: list[SampleRecord] = []
        for batch in self._graded_batches([tasks[i] for i in order], inquiry):
            records += batch
            progress(batch)
        return [records[place] for place in places(order)]

    def evaluate_into(self, log: SampleLog, suite: Suite, decoding: str, progress: Progress) -> Iterator[SampleRecord]:
        """The same by way of a file: all is asked and graded when this returns, and then read one by one.

        Each batch is kept in `log`, and those that an earlier attempt has left there are not asked for again (nor given
        to `progress`). An engine that fails leaves there whatever it has generated before.
        """
        inquiry = self._inquiry(suite, decoding)
        tasks = inquiry.tasks()
        order = asking_order(tasks)
        kept = log.resume([tasks[i].key for i in order], self._batch_size)
        for batch in self._graded_batches([tasks[i] for i in order[kept:]], inquiry):
            log.append(batch)
            progress(batch)
        return log.read(places(order))

    def _inquiry(self, suite: Suite, decoding: str) -> Inquiry:
        return Inquiry(suite, decoding, self._config, self._respondent.ask, self._seed)

    def _graded_batches(self, tasks: Sequence[Task], inquiry: Inquiry) -> Iterator[list[SampleRecord]]:
        grading = ThreadPoolExecutor(1, thread_name_prefix="evaluate")
        waiting: Future[list[SampleRecord]] | None = None
        try:
            for start in range(0, len(tasks), self._batch_size):
                batch = tasks[start : start + self._batch_size]
                responses = self._respond(batch, inquiry)
                if waiting is not None:
                    yield waiting.result()
                waiting = grading.submit(self._graded, batch, responses, inquiry)
        except Exception:
            # What was generated before the engine failed is not lost with it.
            if waiting is not None:
                yield waiting.result()
            raise
        finally:
            # An interrupt does not wait: whoever closes the pool of graders ends the thread, too.
            grading.shutdown(wait=False)
        if waiting is not None:
            yield waiting.result()

    def _respond(self, tasks: Sequence[Task], inquiry: Inquiry) -> Iterable[Response]:
        asked, seeds = [task.asked for task in tasks], [task.seed for task in tasks]
        return self._respondent.respond(asked, seeds, inquiry.how, inquiry.max_response_tokens)

    def _graded(self, tasks: Sequence[Task], said: Iterable[Response], inquiry: Inquiry) -> list[SampleRecord]:
        return _graded(self._grader, inquiry, tasks, list(said), second=self._second_opinion)


def grade_drawn(
    inquiry: Inquiry, drawn: Iterable[SampleRecord], grader: GraderPool, progress: Progress
) -> Iterator[SampleRecord]:
    """Yield the records of an inquiry whose responses are `drawn` already, graded anew, problem by problem.

    Raises DataError where `drawn` are not the responses to this inquiry.
    """
    left, tasks = iter(drawn), inquiry.tasks()
    for start in range(0, len(tasks), _REGRADED_AT_ONCE):
        batch = tasks[start : start + _REGRADED_AT_ONCE]
        records = [next(left, None) for _ in batch]
        responses = [_drawn(task, record) for task, record in zip(batch, records, strict=True)]
        graded = _graded(grader, inquiry, batch, responses)
        progress(graded)
        yield from graded


def _drawn(task: Task, record: SampleRecord | None) -> Response:
    if record is None or (record.uid, record.sample, record.seed, record.prompt) != (*task.key, task.asked.text):
        raise DataError(f"no response to sample {task.sample} of problem {task.prompt.uid}")
    return Response(record.response, record.num_tokens, FinishReason(record.finish_reason))


def _graded(
    grader: GraderPool, inquiry: Inquiry, tasks: Sequence[Task], responses: Sequence[Response], *, second: bool = True
) -> list[SampleRecord]:
    requests = [
        GradeRequest(response.text, task.prompt.ground_truth, problem_of(task.prompt), inquiry.how.grader)
        for task, response in zip(tasks, responses, strict=True)
    ]
    verdicts = opinions(grader, requests, second=second)
    _refuse_silence(verdicts)
    return [
        verdict.entered(_record(inquiry, task, response))
        for task, response, verdict in zip(tasks, responses, verdicts, strict=True)
    ]


def protocol_of(config: EvaluationConfig, suite: str, decoding: str) -> Protocol:
    """How the suite is asked under the decoding, as results say it."""
    how = config.protocol(suite, decoding)
    return Protocol(
        template=how.template,
        temperature=how.temperature,
        top_p=how.top_p,
        max_response_tokens=config.max_response_tokens,
        stop=(*stops_of(how.template), *how.stop),
        engine=config.engine,
    )


def is_confidential(prompt: Prompt) -> bool:
    """Whether the text of the problem may be shown nowhere; GPQA's may not, whoever prepared it."""
    return bool(prompt.extra_info.get("confidential")) or "gpqa" in prompt.data_source.lower()


def check_suite(
    suite: Suite,
    tokenizer: PreTrainedTokenizerBase,
    max_response_tokens: int,
    context_length: int | None,
    template: str = OWN,
) -> int:
    """Refuse a suite that could not be evaluated whole; `context_length` None: the model names no limit.

    Returns the tokens of its longest prompt. Raises DataError for a suite without problems, a problem that occurs
    twice, one that the template cannot ask, and prompts that leave no room for `max_response_tokens`: evaluating only
    the rest would be another benchmark under the same name.
    """
    lengths = [len(ids) for ids in check_problems(suite, lambda prompts: ask(tokenizer, prompts, template))]
    room = None if context_length is None else context_length - max_response_tokens
    too_long = 0 if room is None else sum(length > room for length in lengths)
    if too_long:
        raise DataError(
            f"suite {suite.name}: {too_long} of {len(lengths)} prompts do not fit: the longest has {max(lengths)} "
            f"tokens, and {context_length} of the model less {max_response_tokens} of the response leave {room}; "
            "lower evaluation.max_response_tokens, or leave them out of the suite's source"
        )
    return max(lengths)


def check_problems(suite: Suite, ask: Callable[[Sequence[Prompt]], list[_Asked]]) -> list[_Asked]:
    """What `ask` makes of the problems; DataError without any, for one that occurs twice, or that cannot be asked."""
    if not suite.prompts:
        raise DataError(
            f"suite {suite.name}: has no problems; remove it from data.suites or give it a source with rows"
        )
    repeated = len(suite.prompts) - len({prompt.uid for prompt in suite.prompts})
    if repeated:
        raise DataError(
            f"suite {suite.name}: {repeated} rows repeat a problem; give each once, and set the number of responses a "
            "problem by num_samples in evaluation.decodings or evaluation.suites"
        )
    try:
        return ask(suite.prompts)
    except DataError as error:
        raise DataError(f"suite {suite.name}: {error}") from None


def _refuse_silence(verdicts: Sequence[Opinions]) -> None:
    """Raise LostError where a judge could not be asked: that says nothing of the responses."""
    lost = [verdict.grade for verdict in verdicts if is_unjudged(verdict.grade)]
    if lost:
        raise LostError(
            f"{len(lost)} of {len(verdicts)} responses are without a verdict ({lost[0].reason}); what was graded "
            "before is kept, and the same command goes on behind it"
        )


def _record(inquiry: Inquiry, task: Task, response: Response) -> SampleRecord:
    """The record before it is graded."""
    prompt = task.prompt
    num_options = prompt.extra_info.get("num_options") or len(problem_of(prompt).options)
    return SampleRecord(
        suite=inquiry.suite,
        decoding=inquiry.decoding,
        uid=prompt.uid,
        sample=task.sample,
        seed=task.seed,
        prompt=task.asked.text,
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
        confidential=is_confidential(prompt),
    )


def _label(prompt: Prompt, names: Sequence[str]) -> str | None:
    found = (prompt.extra_info.get(name) for name in names)
    return next((str(value) for value in found if isinstance(value, str | int) and value != ""), None)

"""One model, one suite, one decoding: ask, generate, grade, record.

The draw of a response depends on (seed, suite, decoding, problem, sample) alone, so every checkpoint meets the same
random numbers, and an evaluation that resumes or is batched differently asks for the same draws.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import EvaluationConfig, SuiteProtocol
from luffy.data.prompt_templates import OWN, ask, stops_of
from luffy.errors import DataError, LostError
from luffy.evaluation.opinions import Opinions, opinions
from luffy.evaluation.respondents import AskedPrompt, Respondent, Response
from luffy.evaluation.results import Protocol, SampleRecord
from luffy.evaluation.sample_log import Key, SampleLog
from luffy.grading import GradeRequest, GraderPool, is_unjudged, problem_of
from luffy.seeds import derive_seed
from luffy.types import Prompt

_Asked = TypeVar("_Asked")
_SUBJECTS = ("subject", "subfield", "category", "High-level domain", "course")
_LEVELS = ("level", "difficulty")
"""What data sets call them in `extra_info`."""


@dataclass(frozen=True, slots=True)
class Suite:
    """Problems that are evaluated together."""

    name: str
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class _Task:
    """One response to get."""

    prompt: Prompt
    asked: AskedPrompt
    sample: int
    seed: int

    @property
    def key(self) -> Key:
        return self.prompt.uid, self.sample, self.seed


@dataclass(frozen=True, slots=True)
class _Cell:
    """A suite under a decoding."""

    suite: str
    decoding: str
    how: SuiteProtocol


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

    def evaluate(
        self,
        suite: Suite,
        decoding: str,
        progress: Callable[[Sequence[SampleRecord]], None],
        log: SampleLog | None = None,
    ) -> list[SampleRecord]:
        """All responses to `suite` under the decoding of that name, problem by problem; `progress` gets each batch.

        With `log` each batch is kept there, and those that an earlier attempt has left there are not asked for again
        (nor given to `progress`). An engine that fails leaves there whatever it has generated before.
        """
        cell = _Cell(suite.name, decoding, self._config.protocol(suite.name, decoding))
        tasks = self._tasks(suite, cell)
        # Prompts of a length together waste no padding; the records come back in the order of the problems.
        order = sorted(range(len(tasks)), key=lambda i: (tasks[i].asked.length, i))
        records = log.resume([tasks[i].key for i in order], self._batch_size) if log is not None else []
        for batch in self._graded_batches([tasks[i] for i in order[len(records) :]], cell):
            if log is not None:
                log.append(batch)
            records += batch
            progress(batch)
        place = {i: position for position, i in enumerate(order)}
        return [records[place[i]] for i in range(len(tasks))]

    def _tasks(self, suite: Suite, cell: _Cell) -> list[_Task]:
        all_asked = self._respondent.ask(suite.prompts, cell.how.template)
        return [
            _Task(prompt, asked, sample, self._draw(suite.name, cell.decoding, prompt.uid, sample))
            for prompt, asked in zip(suite.prompts, all_asked, strict=True)
            for sample in range(cell.how.num_samples)
        ]

    def _draw(self, suite: str, decoding: str, uid: str, sample: int) -> int:
        return derive_seed(self._seed, "evaluate", suite, decoding, uid, sample)

    def _graded_batches(self, tasks: Sequence[_Task], cell: _Cell) -> Iterator[list[SampleRecord]]:
        grading = ThreadPoolExecutor(1, thread_name_prefix="evaluate")
        waiting: Future[list[SampleRecord]] | None = None
        try:
            for start in range(0, len(tasks), self._batch_size):
                batch = tasks[start : start + self._batch_size]
                responses = self._respond(batch, cell)
                if waiting is not None:
                    yield waiting.result()
                waiting = grading.submit(self._graded, batch, responses, cell)
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

    def _respond(self, tasks: Sequence[_Task], cell: _Cell) -> Iterable[Response]:
        asked, seeds = [task.asked for task in tasks], [task.seed for task in tasks]
        return self._respondent.respond(asked, seeds, cell.how, self._config.max_response_tokens)

    def _graded(self, tasks: Sequence[_Task], said: Iterable[Response], cell: _Cell) -> list[SampleRecord]:
        responses = list(said)
        requests = [
            GradeRequest(response.text, task.prompt.ground_truth, problem_of(task.prompt), cell.how.grader)
            for task, response in zip(tasks, responses, strict=True)
        ]
        verdicts = opinions(self._grader, requests, second=self._second_opinion)
        _refuse_silence(verdicts)
        return [
            verdict.entered(_record(cell, task, response))
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


def _record(cell: _Cell, task: _Task, response: Response) -> SampleRecord:
    """The record before it is graded."""
    prompt = task.prompt
    num_options = prompt.extra_info.get("num_options") or len(problem_of(prompt).options)
    return SampleRecord(
        suite=cell.suite,
        decoding=cell.decoding,
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

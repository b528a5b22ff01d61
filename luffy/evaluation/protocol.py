"""One model, one suite, one decoding: ask, generate, grade, record.

The draw of a response depends on (seed, suite, decoding, problem, sample) alone, so every checkpoint meets the same
random numbers, and an evaluation that resumes or is batched differently asks for the same draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.data.templates import decode, prompt_opener, render_prompts, stop_token_ids
from luffy.errors import DataError
from luffy.evaluation.results import SampleRecord
from luffy.grading import Grade, GradeRequest, GraderPool, problem_of
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.seeds import derive_seed
from luffy.types import Outcome, Prompt


@dataclass(frozen=True, slots=True)
class Suite:
    """Problems that are evaluated together."""

    name: str
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True)
class _Task:
    """One response to get."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    sample: int
    seed: int


class Evaluator:
    """Evaluates the model behind `engine`; `batch_size` responses are generated and graded at a time."""

    def __init__(
        self,
        engine: RolloutEngine,
        grader: GraderPool,
        tokenizer: PreTrainedTokenizerBase,
        config: EvaluationConfig,
        seed: int,
        batch_size: int,
    ) -> None:
        self._engine = engine
        self._grader = grader
        self._tokenizer = tokenizer
        self._config = config
        self._seed = seed
        self._batch_size = batch_size
        self._opener = prompt_opener(tokenizer)

    def evaluate(
        self, suite: Suite, decoding: str, progress: Callable[[Sequence[SampleRecord]], None]
    ) -> list[SampleRecord]:
        """All responses to `suite` under the decoding of that name, problem by problem; `progress` gets each batch."""
        tasks = self._tasks(suite, decoding, self._config.decodings[decoding])
        # Prompts of a length together waste no padding; the records come back in the order of the problems.
        by_length = sorted(range(len(tasks)), key=lambda i: (len(tasks[i].prompt_ids), i))
        records: dict[int, SampleRecord] = {}
        for start in range(0, len(by_length), self._batch_size):
            indices = by_length[start : start + self._batch_size]
            batch = self._respond([tasks[i] for i in indices], suite.name, decoding)
            records.update(zip(indices, batch, strict=True))
            progress(batch)
        return [records[i] for i in range(len(tasks))]

    def _tasks(self, suite: Suite, name: str, decoding: DecodingConfig) -> list[_Task]:
        prompt_ids = render_prompts(self._tokenizer, [prompt.messages for prompt in suite.prompts])
        return [
            _Task(prompt, tuple(ids), sample, derive_seed(self._seed, "evaluate", suite.name, name, prompt.uid, sample))
            for prompt, ids in zip(suite.prompts, prompt_ids, strict=True)
            for sample in range(decoding.num_samples)
        ]

    def _respond(self, tasks: Sequence[_Task], suite: str, decoding: str) -> list[SampleRecord]:
        params = SamplingParams(
            self._config.decodings[decoding].temperature,
            self._config.max_response_tokens,
            stop_token_ids(self._tokenizer),
        )
        completions = self._engine.generate([RolloutRequest(task.prompt_ids, task.seed) for task in tasks], params)
        # A template may have opened the reasoning in the prompt: without its opener, a box inside unfinished reasoning
        # would pass for an answer.
        responses = [self._opener + decode(self._tokenizer, completion.token_ids) for completion in completions]
        grades = self._grader.grade(
            [self._grading(suite, task, response) for task, response in zip(tasks, responses, strict=True)]
        )
        return [
            self._record(suite, decoding, task, completion, response, grade)
            for task, completion, response, grade in zip(tasks, completions, responses, grades, strict=True)
        ]

    def _grading(self, suite: str, task: _Task, response: str) -> GradeRequest:
        kind = self._config.graders.get(suite)
        return GradeRequest(response, task.prompt.ground_truth, problem_of(task.prompt), kind)

    def _record(
        self,
        suite: str,
        decoding: str,
        task: _Task,
        completion: Completion,
        response: str,
        grade: Grade,
    ) -> SampleRecord:
        return SampleRecord(
            suite=suite,
            decoding=decoding,
            uid=task.prompt.uid,
            sample=task.sample,
            seed=task.seed,
            prompt=decode(self._tokenizer, task.prompt_ids),
            response=response,
            answer=grade.extracted,
            ground_truth=task.prompt.ground_truth,
            outcome=grade.outcome.value,
            reason=grade.reason,
            correct=grade.outcome is Outcome.CORRECT,
            finish_reason=completion.finish_reason.value,
            num_tokens=len(completion.token_ids),
        )


def check_suite(
    suite: Suite, tokenizer: PreTrainedTokenizerBase, max_response_tokens: int, context_length: int | None
) -> None:
    """Refuse a suite that could not be evaluated whole; `context_length` None: the model names no limit.

    Raises DataError for a suite without problems, a problem that occurs twice, and prompts that leave no room for
    `max_response_tokens`: evaluating only the rest would be another benchmark under the same name.
    """
    if not suite.prompts:
        raise DataError(
            f"suite {suite.name}: has no problems; remove it from data.suites or give it a source with rows"
        )
    repeated = len(suite.prompts) - len({prompt.uid for prompt in suite.prompts})
    if repeated:
        raise DataError(
            f"suite {suite.name}: {repeated} rows repeat a problem; give each once, and set the number of responses a "
            "problem by num_samples in evaluation.decodings"
        )
    if context_length is None:
        return
    room = context_length - max_response_tokens
    lengths = [len(ids) for ids in render_prompts(tokenizer, [prompt.messages for prompt in suite.prompts])]
    too_long = sum(length > room for length in lengths)
    if too_long:
        raise DataError(
            f"suite {suite.name}: {too_long} of {len(lengths)} prompts do not fit: the longest has {max(lengths)} "
            f"tokens, and {context_length} of the model less {max_response_tokens} of the response leave {room}; "
            "lower data.max_prompt_tokens or evaluation.max_response_tokens"
        )

"""One suite under one decoding: the same draws however it is batched, and nothing dropped in silence."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.patience import PATIENCE_S
from synthetic.answered_stage import stage_context
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from luffy.config.environment import EpisodeLimits
from luffy.config.evaluation import DecodingConfig, EvaluationConfig, SuiteConfig
from luffy.config.grading import FormatGrader, JudgeGrader, MathGrader
from luffy.data.templates import render_prompts
from luffy.errors import ClusterError, DataError, EnvironmentFault
from luffy.evaluation.sample_files import SampleRecord
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade, GradeRequest
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.stages.answers.asker import Asker, ResponseProgress, graded_records
from luffy.stages.answers.clients import (
    ModelClient,
    Questions,
    Suite,
    TokenModelClient,
    check_suite,
    render_as_ids,
)
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.types import FinishReason, Outcome

TOKENIZER = tiny_tokenizer()
CONFIG = EvaluationConfig(
    decodings={"greedy": DecodingConfig(temperature=0.0), "sampled": DecodingConfig(temperature=1.0, num_samples=3)},
    max_response_tokens=32,
)

SUMS = Suite("sums", problems(12))
Evaluate = Callable[..., list[SampleRecord]]
LONGEST = len(render_prompts(TOKENIZER, [problems(11)[10].messages])[0])
"""Tokens of the one prompt with a number of two digits."""


def solve(prompt: str, seed: int) -> str:
    number = int(re.findall(r"\d+", prompt)[0])
    return f"\\boxed{{{number + 1}}}" if number % 2 == 0 else "<think>1 + 1"


def by_seed(prompt: str, seed: int) -> str:
    return f"\\boxed{{{seed % 1000}}}"


@pytest.fixture(scope="module")
def grader() -> Iterator[GraderPool]:
    with GraderPool(1, PATIENCE_S) as pool:
        yield pool


class Bench:
    """Asks a model in one stage's directory."""

    def __init__(self, folder: Path, grader: GraderPool) -> None:
        self.store = AnswerStore(folder / "answers.jsonl")
        self._grader = grader
        self.batches: list[int] = []

    def ask(
        self,
        client: ModelClient,
        *suites: Suite,
        decoding: str = "greedy",
        batch_size: int = 4,
        seed: int = 7,
        config: EvaluationConfig = CONFIG,
        grader: GraderPool | None = None,
        calls_at_once: int = 1,
        limits: EpisodeLimits | None = None,
        tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    ) -> list[list[SampleRecord]]:
        """The records of each suite."""
        render = render_as_ids(tokenizer)
        requests = [Questions.of_suite(suite, decoding, config, render, seed) for suite in suites]
        asker = Asker(client, grader or self._grader, batch_size, calls_at_once=calls_at_once, limits=limits)
        asker.ask(requests, self.store, lambda answers: self.batches.append(len(answers)))
        return [list(graded_records(request, self.store)) for request in requests]


@pytest.fixture
def bench(tmp_path, grader) -> Bench:
    return Bench(tmp_path, grader)


def scripted(script: Callable[[str, int], str]) -> TokenModelClient:
    return TokenModelClient(ScriptedEngine(TOKENIZER, script), TOKENIZER)


@pytest.fixture
def evaluate(tmp_path, grader) -> Evaluate:
    """Asks twelve problems, each time in a new directory."""

    def evaluated(script: Callable[[str, int], str], decoding: str = "greedy", **options: Any) -> list[SampleRecord]:
        folder = tmp_path / f"evaluation-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (records,) = Bench(folder, grader).ask(scripted(script), SUMS, decoding=decoding, **options)
        return records

    return evaluated


def test_records_say_what_was_asked_answered_and_found(evaluate):
    first, second = evaluate(solve, "greedy")[:2]
    assert (first.uid, first.answer, first.ground_truth) == ("p0", "1", "1")
    assert (first.outcome, first.correct) == ("correct", True)
    assert (second.answer, second.outcome, second.correct) == (None, "no_answer", False)
    assert (first.reason, second.reason) == ("the same text or number", "the reasoning is not closed")
    assert first.prompt == "<|bos|>0 +1\n"
    assert first.finish_reason == "stop"
    assert first.num_tokens == len(TOKENIZER(first.response)["input_ids"]) + 1


class FailingEpisodes(TokenModelClient):
    """Answers rightly, and says that the environment failed afterwards."""

    def generate(self, batch: Questions) -> Iterable[ModelAnswer]:
        for response in super().generate(batch):
            yield replace(response, finish_reason=FinishReason.ENVIRONMENT_ERROR)


def test_an_episode_whose_environment_failed_is_crashed_and_not_an_answer(bench):
    client = FailingEpisodes(ScriptedEngine(TOKENIZER, solve), TOKENIZER)
    (records,) = bench.ask(client, Suite("sums", problems(2)))
    assert [(record.outcome, record.correct, record.has_failed) for record in records] == [("crashed", False, True)] * 2


def test_a_suite_may_have_its_own_grader(evaluate):
    suites = {"sums": SuiteConfig(grader=FormatGrader()), "others": SuiteConfig(grader=MathGrader())}
    config = CONFIG.model_copy(update={"suites": suites})
    records = evaluate(lambda prompt, seed: "<think>1</think>2", "greedy", config=config)
    assert {record.outcome for record in records} == {"correct"}


def test_draws_do_not_depend_on_the_batch_size(evaluate):
    assert evaluate(by_seed, "sampled", batch_size=1) == evaluate(by_seed, "sampled", batch_size=100)


def test_every_sample_has_its_own_seed_and_every_checkpoint_the_same(evaluate):
    seeds = [record.seed for record in evaluate(by_seed, "sampled")]
    assert len(set(seeds)) == 36
    assert seeds == [record.seed for record in evaluate(solve, "sampled")]
    assert set(seeds).isdisjoint(record.seed for record in evaluate(by_seed, "sampled", seed=8))
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_records_come_problem_by_problem_in_the_order_of_the_suite(evaluate):
    order = [(record.uid, record.sample) for record in evaluate(solve, "sampled")]
    assert order == [(f"p{i}", sample) for i in range(12) for sample in range(3)]


def test_a_response_past_the_limit_is_counted_as_truncated(evaluate):
    records = evaluate(lambda prompt, seed: "1 " * 40, "greedy")
    assert {record.finish_reason for record in records} == {"length"}
    assert {record.num_tokens for record in records} == {32}


def test_a_box_in_reasoning_that_the_template_opened_is_no_answer(bench):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "<think>"
    engine = ScriptedEngine(tokenizer, lambda prompt, seed: "\\boxed{1}")
    ((record,),) = bench.ask(TokenModelClient(engine, tokenizer), Suite("sums", problems(1)), tokenizer=tokenizer)
    assert (record.outcome, record.response) == ("no_answer", "<think>\\boxed{1}")


def test_a_response_ends_behind_the_first_stop_text_whether_the_engine_looked_for_it_or_not(evaluate):
    config = CONFIG.model_copy(update={"stop": ("reverse", " 3")})
    record = evaluate(lambda prompt, seed: "\\boxed{1} 2 3 4 reverse 5", "greedy", config=config)[0]
    assert record.response == "\\boxed{1} 2 3"
    assert (record.finish_reason, record.correct) == ("stop", True)
    assert record.num_tokens == len(TOKENIZER(record.response)["input_ids"])


def test_a_stop_text_within_the_limit_is_no_truncation(evaluate):
    suites = {"sums": SuiteConfig(stop=("=",))}
    config = CONFIG.model_copy(update={"suites": suites})
    records = evaluate(lambda prompt, seed: "1 =" + " 1" * 40, "greedy", config=config)
    assert {(record.response, record.finish_reason) for record in records} == {("1 =", "stop")}


def test_a_template_asks_in_its_own_words_and_opens_what_it_opens(evaluate):
    config = CONFIG.model_copy(update={"template": "r1_zero"})
    record = evaluate(lambda prompt, seed: "1</think> <answer>\\boxed{1}</answer> 7", "greedy", config=config)[0]
    assert record.prompt.endswith("\nUser: 0 +1\nAssistant: <think>")
    assert record.response == "<think>1</think> <answer>\\boxed{1}</answer>"
    assert record.correct


def test_records_say_what_the_data_says_of_a_problem(bench):
    extra = [
        {"subject": "Algebra", "level": 5},
        {"subfield": "Number Theory", "options": ["1", "2", "3"], "confidential": True},
        {},
    ]
    prompts = [replace(prompt, extra_info=info) for prompt, info in zip(problems(3), extra, strict=True)]
    prompts[2] = replace(prompts[2], data_source="GPQA-main")
    (records,) = bench.ask(scripted(solve), Suite("sums", prompts))
    said = [(record.subject, record.level, record.num_options, record.confidential) for record in records]
    assert said == [("Algebra", "5", None, False), ("Number Theory", None, 3, True), (None, None, None, True)]


def test_mathematics_gets_a_second_opinion_and_nothing_else_does(evaluate):
    record = evaluate(lambda prompt, seed: "\\boxed{1.0}", "greedy")[0]
    assert (record.grader, record.outcome, record.second_grader) == ("math", "correct", "math_strict")
    assert record.second_outcome == "correct"
    config = CONFIG.model_copy(update={"suites": {"sums": SuiteConfig(grader=FormatGrader())}})
    record = evaluate(solve, "greedy", config=config)[0]
    assert (record.grader, record.second_grader, record.second_outcome) == ("format", None, None)


def test_a_batch_is_graded_while_the_next_one_is_generated(bench):
    """The second batch is not given out before the first one is in grading: neither could wait for the other."""
    grading, generating = threading.Event(), threading.Event()

    class Grader(GraderPool):
        def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
            grading.set()
            assert generating.wait(PATIENCE_S)
            return super().grade(requests)

    class Engine(ScriptedEngine):
        def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
            if self.requests:
                assert grading.wait(PATIENCE_S)
                generating.set()
            return super().generate(requests, params)

    with Grader(1, PATIENCE_S) as grader:
        client = TokenModelClient(Engine(TOKENIZER, solve), TOKENIZER)
        (records,) = bench.ask(client, SUMS, batch_size=6, grader=grader)
    assert [record.uid for record in records] == [f"p{i}" for i in range(12)]


class Failing(ScriptedEngine):
    """A server that is gone after `calls` calls."""

    calls = 2

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        if not self.calls:
            raise ClusterError("http://host:8000: no answer")
        self.calls -= 1
        return super().generate(requests, params)


@pytest.mark.parametrize("calls_at_once", [1, 2])
def test_what_was_generated_before_the_engine_failed_is_kept_and_not_asked_for_again(bench, evaluate, calls_at_once):
    failing = TokenModelClient(Failing(TOKENIZER, by_seed), TOKENIZER)
    with pytest.raises(ClusterError, match="no answer"):
        bench.ask(failing, SUMS, decoding="sampled", batch_size=5, calls_at_once=calls_at_once)
    # Of two calls at once, the third may overtake the second, which then is the one that fails.
    assert bench.batches in ([[5, 5]] if calls_at_once == 1 else [[5, 5], [5]])
    kept = sum(bench.batches)
    engine = ScriptedEngine(TOKENIZER, by_seed)
    (records,) = bench.ask(TokenModelClient(engine, TOKENIZER), SUMS, decoding="sampled", batch_size=5)
    assert len(engine.requests) == 36 - kept
    assert records == evaluate(by_seed, "sampled")


class OneFailsInEachCall(TokenModelClient):
    def generate(self, batch: Questions) -> list[ModelAnswer]:
        first, *others = super().generate(batch)
        return [replace(first, finish_reason=FinishReason.ENVIRONMENT_ERROR), *others]


def test_failures_of_the_environment_are_counted_over_the_suite_and_not_over_a_call(bench):
    """One in four is too much, but a single one is not; with the environment mended, the evaluation goes on."""
    limits = EpisodeLimits(max_failed_share=0.1)
    client = OneFailsInEachCall(ScriptedEngine(TOKENIZER, by_seed), TOKENIZER)
    for _ in range(2):  # a resumed evaluation knows of the failures before it
        with pytest.raises(EnvironmentFault, match="failed in 4 of 16 episodes"):
            bench.ask(client, SUMS, decoding="sampled", limits=limits)
    assert bench.batches == [4] * 3
    (records,) = bench.ask(scripted(by_seed), SUMS, decoding="sampled", limits=limits)
    assert bench.batches == [4] * 9
    assert [record.outcome for record in records].count("crashed") == 3


class Together(ScriptedEngine):
    """Answers no call before `number` of them have come, and counts those that run at a time."""

    def __init__(self, number: int) -> None:
        super().__init__(TOKENIZER, by_seed)
        self._barrier = threading.Barrier(number)
        self._running = 0
        self._counting = threading.Lock()
        self.most = 0

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        with self._counting:
            self._running += 1
            self.most = max(self.most, self._running)
        self._barrier.wait(PATIENCE_S)
        with self._counting:
            completions = super().generate(requests, params)
            self._running -= 1
        return completions


def test_calls_of_several_suites_run_at_once_and_their_results_come_in_order(tmp_path, grader):
    """The first three calls are those of three suites: none is answered before all have come."""
    suites = [Suite(name, problems(number)) for name, number in (("a", 1), ("b", 1), ("c", 1), ("d", 8))]
    found = []
    for engine, calls in ((ScriptedEngine(TOKENIZER, by_seed), 1), (Together(3), 3)):
        (tmp_path / str(calls)).mkdir()
        bench, client = Bench(tmp_path / str(calls), grader), TokenModelClient(engine, TOKENIZER)
        records = bench.ask(client, *suites, decoding="sampled", calls_at_once=calls)
        found.append((records, bench.batches, (tmp_path / str(calls) / "answers.jsonl").read_bytes()))
    assert engine.most == 3
    assert found[0] == found[1]
    assert [{record.suite for record in cell} for cell in found[1][0]] == [{"a"}, {"b"}, {"c"}, {"d"}]
    assert found[1][1] == [3, 3, 3, 4, 4, 4, 4, 4, 4]


def test_a_suite_that_fits_passes():
    assert check_suite(Suite("sums", problems(11)), TOKENIZER, 32, 64) == LONGEST
    check_suite(Suite("sums", problems(3)), TOKENIZER, 32, None)


def test_a_suite_is_checked_under_its_template():
    with pytest.raises(DataError, match="suite sums: 3 of 3 prompts do not fit"):
        check_suite(Suite("sums", problems(3)), TOKENIZER, 32, 64, "r1_zero")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"suite sums: .*has no chat template"):
        check_suite(Suite("sums", problems(3)), tokenizer, 32, 64)


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        ([], "suite sums: has no problems"),
        (problems(2) * 2, "suite sums: 2 rows repeat a problem"),
        (problems(11), f"suite sums: 1 of 11 prompts do not fit: the longest has {LONGEST} tokens"),
    ],
)
def test_a_suite_that_cannot_be_evaluated_whole_is_refused(prompts, complaint):
    with pytest.raises(DataError, match=complaint):
        check_suite(Suite("sums", prompts), TOKENIZER, 32, 32 + LONGEST - 1)


def test_a_judge_that_cannot_be_reached_ends_the_evaluation(evaluate):
    judge = JudgeGrader(url="http://127.0.0.1:9/v1", model="m", retries=0)
    config = CONFIG.model_copy(update={"suites": {"sums": SuiteConfig(grader=judge)}})
    with pytest.raises(ClusterError, match=r"4 of 4 responses have no verdict \(judge: http://127"):
        evaluate(solve_openly, "greedy", config=config)


def solve_openly(prompt: str, seed: int) -> str:
    return "it is 3"


def test_progress_counts_responses_while_their_call_runs_and_each_once(tmp_path: Path) -> None:
    context = stage_context("evaluate_sft", tmp_path, {})
    progress = ResponseProgress(context, total=20, done=4)
    progress.begin()
    told: list[tuple[int, dict[str, float]]] = []
    context.events.progress = lambda step, total, **metrics: told.append((step, metrics))
    for finished, tokens in ((0, 8), (3, 8), (5, 8)):
        progress.heard(finished, tokens)
    answer: Any = SimpleNamespace(num_tokens=3, outcome=Outcome.CORRECT)
    progress.add([answer] * 8)
    progress.heard(8, 8)
    progress.add([answer] * 8)
    assert [step for step, _ in told] == [4, 7, 12, 12, 20, 20]
    assert progress.tokens == 32 and all(metrics["tokens_per_s"] > 0 for _, metrics in told)
    assert "reward" not in told[2][1] and "reward" in told[3][1]

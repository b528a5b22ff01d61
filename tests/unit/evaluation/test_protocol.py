"""One suite under one decoding: the same draws however it is batched, and nothing dropped in silence."""

import re
from collections.abc import Callable

import pytest
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer

from luffy.config.evaluation import DecodingConfig, EvaluationConfig, SuiteConfig
from luffy.config.grading import FormatGrader, MathGrader
from luffy.data.templates import render_prompt
from luffy.errors import DataError
from luffy.evaluation.protocol import Evaluator, Suite, check_suite
from luffy.evaluation.results import SampleRecord
from luffy.grading import GraderPool
from luffy.types import Prompt

TOKENIZER = tiny_tokenizer()
CONFIG = EvaluationConfig(
    decodings={"greedy": DecodingConfig(temperature=0.0), "sampled": DecodingConfig(temperature=1.0, num_samples=3)},
    max_response_tokens=32,
)

LONGEST = len(render_prompt(TOKENIZER, problems(11)[10].messages))
"""Tokens of the one prompt with a number of two digits."""


def solve(prompt: str, seed: int) -> str:
    number = int(re.findall(r"\d+", prompt)[0])
    return f"\\boxed{{{number + 1}}}" if number % 2 == 0 else "<think>1 + 1"


def by_seed(prompt: str, seed: int) -> str:
    return f"\\boxed{{{seed % 1000}}}"


def evaluate(
    script: Callable[[str, int], str],
    decoding: str,
    batch_size: int = 4,
    seed: int = 7,
    config: EvaluationConfig = CONFIG,
) -> list[SampleRecord]:
    engine = ScriptedEngine(TOKENIZER, script)
    with GraderPool(1, 5.0) as grader:
        evaluator = Evaluator(engine, grader, TOKENIZER, config, seed, batch_size)
        return evaluator.evaluate(Suite("sums", problems(12)), decoding, lambda batch: None)


def test_records_say_what_was_asked_answered_and_found() -> None:
    first, second = evaluate(solve, "greedy")[:2]
    assert (first.uid, first.answer, first.ground_truth) == ("p0", "1", "1")
    assert (first.outcome, first.correct) == ("correct", True)
    assert (second.answer, second.outcome, second.correct) == (None, "no_answer", False)
    assert (first.reason, second.reason) == ("the same text or number", "the reasoning is not closed")
    assert first.prompt == "<|bos|>0 +1\n"
    assert first.finish_reason == "stop"
    assert first.num_tokens == len(TOKENIZER(first.response)["input_ids"]) + 1


def test_a_suite_may_have_its_own_grader() -> None:
    suites = {"sums": SuiteConfig(grader=FormatGrader()), "others": SuiteConfig(grader=MathGrader())}
    config = CONFIG.model_copy(update={"suites": suites})
    records = evaluate(lambda prompt, seed: "<think>1</think>2", "greedy", config=config)
    assert {record.outcome for record in records} == {"correct"}


def test_draws_do_not_depend_on_the_batch_size() -> None:
    assert evaluate(by_seed, "sampled", batch_size=1) == evaluate(by_seed, "sampled", batch_size=100)


def test_every_sample_has_its_own_seed_and_every_checkpoint_the_same() -> None:
    seeds = [record.seed for record in evaluate(by_seed, "sampled")]
    assert len(set(seeds)) == 36
    assert seeds == [record.seed for record in evaluate(solve, "sampled")]
    assert set(seeds).isdisjoint(record.seed for record in evaluate(by_seed, "sampled", seed=8))
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_records_come_problem_by_problem_in_the_order_of_the_suite() -> None:
    order = [(record.uid, record.sample) for record in evaluate(solve, "sampled")]
    assert order == [(f"p{i}", sample) for i in range(12) for sample in range(3)]


def test_a_response_past_the_limit_is_counted_as_truncated() -> None:
    records = evaluate(lambda prompt, seed: "1 " * 40, "greedy")
    assert {record.finish_reason for record in records} == {"length"}
    assert {record.num_tokens for record in records} == {32}


def test_a_box_in_reasoning_that_the_template_opened_is_no_answer() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "<think>"
    engine = ScriptedEngine(tokenizer, lambda prompt, seed: "\\boxed{1}")
    with GraderPool(1, 5.0) as grader:
        evaluator = Evaluator(engine, grader, tokenizer, CONFIG, 7, 4)
        record = evaluator.evaluate(Suite("sums", problems(1)), "greedy", lambda batch: None)[0]
    assert (record.outcome, record.response) == ("no_answer", "<think>\\boxed{1}")


def test_a_suite_that_fits_passes() -> None:
    check_suite(Suite("sums", problems(3)), TOKENIZER, 32, 64)
    check_suite(Suite("sums", problems(3)), TOKENIZER, 32, None)


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        ([], "suite sums: has no problems"),
        (problems(2) * 2, "suite sums: 2 rows repeat a problem"),
        (problems(11), f"suite sums: 1 of 11 prompts do not fit: the longest has {LONGEST} tokens"),
    ],
)
def test_a_suite_that_cannot_be_evaluated_whole_is_refused(prompts: list[Prompt], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        check_suite(Suite("sums", prompts), TOKENIZER, 32, 32 + LONGEST - 1)

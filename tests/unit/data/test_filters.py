"""What is let through, and the account of the rest."""

import dataclasses
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from luffy.data.card import card_json, card_markdown, quantiles, source_card
from luffy.data.filters import Filtered, Rejection, Rules, filter_prompts, problems_of, without_traces
from luffy.data.identity import prompt_uid
from luffy.data.sources import LoadedSource, QuarantinedRow
from luffy.data.tokenizer import build_tokenizer, texts_of
from luffy.data.verify_traces import verify_traces
from luffy.grading import GraderPool
from luffy.types import Message, Outcome, Prompt, Trace

TRACES = Path(__file__).parents[3].parent / "shared" / "datasets" / "reasoning_traces" / "gsm8k_qwq32b.parquet"
TOKENIZER = build_tokenizer(["0123456789 +=<>|eos\\boxed{}ntw"])
RULES = Rules(max_prompt_tokens=12, max_trace_tokens=12)


def prompt(question: str, *traces: Trace, truth: str = "2") -> Prompt:
    messages = (Message("user", question),)
    return Prompt(prompt_uid("t", messages), "t", messages, truth, traces)


def trace(text: str, *, verified: bool | None = True) -> Trace:
    return Trace(text, "me", verified)


def reasons(prompts: list[Prompt], rules: Rules = RULES) -> tuple[int, dict[Rejection, int], dict[Rejection, int]]:
    result = filter_prompts(prompts, TOKENIZER, rules)
    assert result.rows_in == len(result.prompts) + sum(result.rejected.values())
    return len(result.prompts), dict(result.rejected), dict(result.rejected_traces)


def test_limits_count_the_bos_and_the_stop_token() -> None:
    fits = prompt("1" * 10, trace("2" * 11))
    assert reasons([fits]) == (1, {}, {})
    assert reasons([prompt("1" * 11)]) == (0, {Rejection.PROMPT_TOO_LONG: 1}, {})
    too_long = prompt("1", trace("2" * 12))
    assert reasons([too_long]) == (0, {Rejection.TRACE_TOO_LONG: 1}, {Rejection.TRACE_TOO_LONG: 1})


def test_a_prompt_stays_with_its_good_traces() -> None:
    result = filter_prompts([prompt("1", trace("a" * 99), trace("2"), trace("3", verified=False))], TOKENIZER, RULES)
    assert [kept.text for kept in result.prompts[0].traces] == ["2"]
    assert (result.prompt_tokens, result.trace_tokens) == ([3], [2])
    assert result.rejected == Counter()
    assert result.rejected_traces == {Rejection.TRACE_TOO_LONG: 1, Rejection.TRACE_UNVERIFIED: 1}


def test_a_prompt_that_loses_all_traces_goes_and_one_that_had_none_stays() -> None:
    lost = prompt("1", trace("2", verified=False), trace("2" * 99))
    stopping = prompt("3", trace("2<|eos|>"))
    kept, rejected, _ = reasons([lost, prompt("2"), stopping])
    assert (kept, rejected) == (1, {Rejection.TRACE_UNVERIFIED: 1, Rejection.TRACE_HOLDS_STOP_TOKEN: 1})


def test_unverified_traces_pass_where_they_may() -> None:
    rules = dataclasses.replace(RULES, require_verified_traces=False)
    assert reasons([prompt("1", trace("2", verified=False))], rules) == (1, {}, {})


def test_repeats_are_rejected_except_where_allowed() -> None:
    repeated = [prompt("1"), prompt("1"), prompt("2")]
    assert reasons(repeated) == (2, {Rejection.DUPLICATE: 1}, {})
    assert reasons(repeated, dataclasses.replace(RULES, allow_repeats=True)) == (3, {}, {})


def test_a_problem_of_a_suite_is_rejected_whatever_its_case_spacing_and_system_prompt() -> None:
    suite = dataclasses.replace(prompt("TWO  + 1"), messages=(Message("system", "now"), Message("user", "TWO\n+ 1")))
    rules = dataclasses.replace(RULES, forbidden_problems=problems_of([suite]))
    assert reasons([prompt("two + 1"), prompt("two + 2")], rules) == (1, {Rejection.IN_SUITE: 1}, {})


def test_a_suite_keeps_no_demonstration() -> None:
    assert without_traces([prompt("1", trace("2"))]) == [prompt("1")]


def test_traces_are_graded_whatever_the_source_claims() -> None:
    claimed = [prompt("1", trace("\\boxed{2}", verified=False), trace("\\boxed{3}")), prompt("2", trace("two"))]
    with GraderPool(1, 5.0) as grader:
        graded, outcomes = verify_traces(claimed, grader)
    assert [found.verified for row in graded for found in row.traces] == [True, False, False]
    assert outcomes == {Outcome.CORRECT: 1, Outcome.WRONG: 1, Outcome.NO_ANSWER: 1}


def test_the_card_accounts_for_every_row() -> None:
    prompts = [prompt("1", trace("2")), prompt("1", trace("2")), prompt("1" * 99)]
    loaded = LoadedSource("file", prompts, "abc", [QuarantinedRow("f", 4, "prompt", "is empty")])
    card = source_card("train", loaded, {Outcome.CORRECT: 2}, filter_prompts(prompts, TOKENIZER, RULES))
    assert card.rows_in == 4 == card.rows_out + card.quarantined + sum(card.rejected.values())
    assert card.trace_authors == {"me": 1}
    assert '"duplicate_uid": 1' in card_json([card], 30)
    assert "| train | file | 4 | 1 | 2 | 1 | 1 |" in card_markdown([card], 30)


def test_quantiles_are_lengths_that_occur() -> None:
    assert quantiles([]) == {}
    assert quantiles(range(1, 101)) == {"min": 1, "p50": 50, "p90": 90, "p99": 99, "max": 100}


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_file(), reason="reasoning_traces are not beside this repository")
def test_real_traces_that_were_cut_have_no_answer() -> None:
    prompts = [
        prompt(
            row["question"],
            Trace("<think>\n" + row["model_answers"]["thinking_model"], row["thinking_model"]),
            truth=row["correct_answer"].rpartition("####")[2].strip(),
        )
        for row in pq.read_table(TRACES).to_pylist()
    ]
    with GraderPool(2, 20.0) as grader:
        graded, outcomes = verify_traces(prompts, grader)
    finished = sum("</think>" in row.traces[0].text for row in prompts)
    assert outcomes[Outcome.CORRECT] > 0.8 * finished
    assert outcomes[Outcome.NO_ANSWER] >= len(prompts) - finished
    tokenizer = build_tokenizer(texts_of(graded))
    result: Filtered = filter_prompts(graded, tokenizer, Rules(4096, 16384))
    assert len(result.prompts) == len({row.uid for row in graded if row.traces[0].verified})

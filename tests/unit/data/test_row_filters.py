"""What is let through, and the account of the rest."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.installed import DATASETS, needs_datasets
from support.patience import PATIENCE_S

from luffy.config.grading import GradingConfig, JudgeGrader
from luffy.data.overlap import BenchmarkIndex
from luffy.data.row_filters import FilteredRow, Rejection, RowFilter, Rules, grade_traces, with_system_prompt
from luffy.data.schema import prompt_uid
from luffy.data.tokenizer import build_tokenizer, texts_of
from luffy.errors import LostError
from luffy.grading.pool import GraderPool
from luffy.types import Message, Outcome, Prompt, Trace

TRACES = DATASETS / "reasoning_traces" / "gsm8k_qwq32b.parquet"
TOKENIZER = build_tokenizer(["0123456789 +=<>|eos\\boxed{}ntw"])
RULES = Rules(max_prompt_tokens=12, max_trace_tokens=12)
RIGHT, WRONG = "\\boxed{2}", "\\boxed{3}"


@pytest.fixture(scope="module")
def grader() -> Iterator[GraderPool]:
    with GraderPool(1, PATIENCE_S) as pool:
        yield pool


def prompt(question: str, *traces: str, truth: str = "2") -> Prompt:
    messages = (Message("user", question),)
    return Prompt(prompt_uid("t", messages), "t", messages, truth, tuple(Trace(text, "me") for text in traces))


def index_of(*prompts: Prompt) -> BenchmarkIndex:
    index = BenchmarkIndex(ngram=13, overlap=0.5)
    index.add("suite", prompts)
    return index.finish()


def judge(
    grader: GraderPool, *prompts: Prompt, rules: Rules = RULES, suite: tuple[Prompt, ...] = ()
) -> list[FilteredRow]:
    return RowFilter(TOKENIZER, rules, index_of(*suite)).apply(prompts, grader)


def reasons(judged: list[FilteredRow]) -> list[Rejection | None]:
    return [row.reason for row in judged]


def test_limits_count_the_bos_and_the_stop_token(grader: GraderPool) -> None:
    rules = dataclasses.replace(RULES, require_verified_traces=False)
    rows = (prompt("1" * 10, "2" * 11), prompt("1" * 11), prompt("1", "2" * 12))
    assert reasons(judge(grader, *rows, rules=rules)) == [None, Rejection.PROMPT_TOO_LONG, Rejection.TRACE_TOO_LONG]


def test_a_prompt_stays_with_its_good_traces(grader: GraderPool) -> None:
    (row,) = judge(grader, prompt("1", RIGHT * 9, RIGHT, WRONG, "no box", "<think>" + RIGHT))
    assert [(trace.text, trace.verified) for trace in row.prompt.traces] == [(RIGHT, True)]
    assert (row.reason, row.prompt_tokens, row.trace_tokens) == (None, 3, (4,))
    found = ["trace_too_long", "trace_wrong", "trace_no_answer", "trace_incomplete"]
    assert [reason for _, reason in row.rejected_traces] == found


def test_a_prompt_that_loses_all_traces_is_dropped_and_one_that_had_none_stays(grader: GraderPool) -> None:
    rows = judge(grader, prompt("1", WRONG, RIGHT * 9), prompt("2"), prompt("3", RIGHT + "<|eos|>"))
    assert reasons(rows) == [Rejection.TRACE_WRONG, None, Rejection.TRACE_HOLDS_STOP_TOKEN]
    assert [row.lost_its_traces for row in rows] == [True, False, True]


def test_the_graders_verdict_overrides_the_claim_of_the_source(grader: GraderPool) -> None:
    claimed = dataclasses.replace(prompt("1"), traces=(Trace(RIGHT, "me", False), Trace(WRONG, "me", True)))
    (row,) = judge(grader, claimed, rules=dataclasses.replace(RULES, require_verified_traces=False))
    assert [trace.verified for trace in row.prompt.traces] == [True, False]
    assert row.outcomes == (Outcome.CORRECT, Outcome.WRONG)


@pytest.mark.parametrize(("template", "in_tag"), [("r1_zero", True), (None, False)])
def test_the_chat_template_decides_where_a_trace_answers(
    grader: GraderPool, template: str | None, in_tag: bool
) -> None:
    tokenizer = build_tokenizer(["0123456789 so\\boxed{}<answer></answer>think\n"])
    if template is not None:
        tokenizer.chat_template = (Path(__file__).parents[3] / f"data/templates/{template}.jinja").read_text()
    traces = ("<think>\n1</think> <answer>2</answer>", "<think>\n1</think> so <answer>2</answer> so")
    rows = RowFilter(tokenizer, Rules(999, 999, require_verified_traces=False), index_of())
    (row,) = rows.apply([prompt("1", *traces)], grader)
    assert row.outcomes == ((Outcome.CORRECT if in_tag else Outcome.NO_ANSWER),) * 2


def test_logprobs_must_count_the_tokens_and_the_stop_token(grader: GraderPool) -> None:
    traces = (Trace(RIGHT, "me", logprobs=(-0.5,) * 4), Trace(RIGHT, "me", logprobs=(-0.5,) * 3))
    (row,) = judge(grader, dataclasses.replace(prompt("1"), traces=traces))
    assert [trace.logprobs for trace in row.prompt.traces] == [(-0.5,) * 4]
    assert [reason for _, reason in row.rejected_traces] == [Rejection.TRACE_LOGPROBS_MISMATCH]


def test_a_think_tag_left_to_a_template_is_opened(grader: GraderPool) -> None:
    (row,) = judge(grader, prompt("1", f"1+1</think>{RIGHT}"))
    assert row.prompt.traces[0].text == f"<think>\n1+1</think>{RIGHT}"


def test_a_problem_of_a_suite_is_rejected_for_any_case_spacing_and_system_prompt(grader: GraderPool) -> None:
    asked = dataclasses.replace(prompt("TWO  + 1"), messages=(Message("system", "now"), Message("user", "TWO\n+ 1")))
    rows = judge(grader, prompt("two + 1"), prompt("two + 2"), suite=(asked,))
    assert reasons(rows) == [Rejection.IN_SUITE, None]
    assert rows[0].hits[0][0] == "prompt" and rows[0].hits[0][1].benchmark == "suite"


def test_a_trace_that_quotes_a_suite_is_rejected_and_listed(grader: GraderPool) -> None:
    problem = " ".join(f"word{number}" for number in range(40))
    rules = Rules(max_prompt_tokens=999, max_trace_tokens=999)
    (row,) = judge(grader, prompt("1", f"As in {problem}: {RIGHT}", RIGHT), rules=rules, suite=(prompt(problem),))
    assert [trace.text for trace in row.prompt.traces] == [RIGHT]
    ((where, hit),) = row.hits
    assert (where, hit.benchmark, hit.row, hit.share) == ("trace", "suite", 1, 1.0)


def test_a_suite_keeps_no_demonstration_and_is_not_compared_with_itself(grader: GraderPool) -> None:
    asked = prompt("1", RIGHT)
    (row,) = judge(grader, asked, rules=dataclasses.replace(RULES, keeps_traces=False), suite=(asked,))
    assert row.prompt == prompt("1") and row.reason is None


def test_the_system_prompt_does_not_change_the_identity_of_a_row() -> None:
    own = dataclasses.replace(prompt("1"), messages=(Message("system", "mine"), Message("user", "1")))
    behind = with_system_prompt([prompt("1"), own], "think")
    assert [row.messages[0].content for row in behind] == ["think", "mine"]
    assert {row.uid for row in behind} == {prompt_uid("t", row.messages) for row in behind} == {prompt("1").uid}


def test_traces_whose_judge_cannot_be_reached_are_not_rejected_but_asked_for_again() -> None:
    config = GradingConfig(kind=JudgeGrader(url="http://127.0.0.1:9/v1", model="m", retries=0))
    rows = [prompt("1 + 1", RIGHT)]
    with GraderPool(1, PATIENCE_S, config) as judged, pytest.raises(LostError, match="1 of 1 traces have no verdict"):
        grade_traces(rows, judged)


@pytest.mark.slow
@needs_datasets
def test_truncated_real_traces_have_no_answer() -> None:
    prompts = [
        prompt(
            row["question"],
            "<think>\n" + row["model_answers"]["thinking_model"],
            truth=row["correct_answer"].rpartition("####")[2].strip(),
        )
        for row in pq.read_table(TRACES).to_pylist()
    ]
    tokenizer = build_tokenizer(texts_of(prompts))
    with GraderPool(2, PATIENCE_S) as grader:
        rows = RowFilter(tokenizer, Rules(4096, 16384), index_of()).apply(prompts, grader)
        outcomes = Counter(outcome for row in grade_traces(prompts, grader) for outcome in row)
    finished = sum("</think>" in row.traces[0].text for row in prompts)
    kept = [row.prompt for row in rows if row.reason is None]
    assert 0.8 * finished < len(kept) == sum(trace.verified is True for row in kept for trace in row.traces)
    assert all(row.traces[0].text.startswith("<think>\n") for row in kept)
    assert outcomes.total() == len(prompts)

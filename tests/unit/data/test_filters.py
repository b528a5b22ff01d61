"""What is let through and the account of the rest: limits and verdicts, references graded against themselves, benchmark
problems and near duplicates, which answers are kept as traces, and pass rates."""

import dataclasses
import json
import random
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.installed import DATASETS, needs_datasets
from support.patience import PATIENCE_S
from synthetic.graders import CHOICE, EXACT, FORMAT, STRICT
from synthetic.loaded_source import load_file

from luffy.config.answers import DifficultyConfig, KeepAnswers
from luffy.config.grading import GradingConfig, JudgeGrader
from luffy.config.shipped import template_file
from luffy.data import answer_cards
from luffy.data.answer_cards import Fit, PassRate, farthest_first, fit_of, is_text, kept_traces
from luffy.data.overlap import NUM_HASHES, BenchmarkIndex, Hit, near_duplicate_clusters, signature, similarity, words
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.row_filters import Rejection, RowFilter, Rules, check_golds, grade_traces, with_system_prompt
from luffy.data.schema import problem_text, prompt_uid
from luffy.data.tokenizer import build_tokenizer, texts_of
from luffy.errors import LostError
from luffy.grading.pool import GraderPool
from luffy.types import Message, Outcome, Prompt, Trace

TOKENIZER = build_tokenizer(["0123456789 +=<>|eos\\boxed{}ntw"])
RULES, LOOSE = Rules(max_prompt_tokens=12, max_trace_tokens=12), Rules(max_prompt_tokens=999, max_trace_tokens=999)
UNVERIFIED = dataclasses.replace(RULES, require_verified_traces=False)
RIGHT, WRONG = "\\boxed{2}", "\\boxed{3}"


def prompt(question, *traces, truth="2", grader=None):
    messages = (Message("user", question),)
    written = tuple(Trace(text, "me") for text in traces)
    return Prompt(prompt_uid("t", messages), "t", messages, truth, written, grader=grader)


def index_of(*prompts):
    index = BenchmarkIndex()
    index.add("suite", prompts)
    return index.finish()


def judge(grader, *prompts, rules=RULES, suite=()):
    return RowFilter(TOKENIZER, rules, index_of(*suite)).apply(prompts, grader)


@pytest.mark.parametrize(("question", "traces", "rules", "reason", "kept", "rejected"), [
    # Limits count the opening token of a prompt and the stop token of a trace.
    ("1", ["2" * 12], UNVERIFIED, None, [], ["trace_too_long"]),
    ("1" * 10, ["2" * 11], UNVERIFIED, None, ["2" * 11], []),
    ("1" * 11, [], UNVERIFIED, Rejection.PROMPT_TOO_LONG, [], []),
    # A prompt that loses all traces stays, like one that had none.
    ("1", [WRONG, RIGHT * 9], RULES, None, [], ["trace_wrong", "trace_too_long"]), ("2", [], RULES, None, [], []),
    ("3", [RIGHT + "<|eos|>"], RULES, None, [], ["trace_holds_stop_token"]),
    ("1", [RIGHT * 9, RIGHT, WRONG, "no box", "<think>" + RIGHT], RULES, None, [RIGHT],
     ["trace_too_long", "trace_wrong", "trace_no_answer", "trace_incomplete"]),
    ("1", [f"1+1</think>{RIGHT}"], LOOSE, None, [f"<think>\n1+1</think>{RIGHT}"], []),  # left to a template
])  # fmt: skip
def test_a_prompt_stays_with_its_good_traces(grader, question, traces, rules, reason, kept, rejected):
    (row,) = judge(grader, prompt(question, *traces), rules=rules)
    assert (row.reason, [str(why) for _, why in row.rejected_traces]) == (reason, rejected)
    assert [trace.text for trace in row.prompt.traces] == kept


def test_a_row_knows_its_sizes_and_the_graders_verdicts_override_the_claims_of_the_source(grader):
    (row,) = judge(grader, prompt("1", RIGHT, WRONG))
    assert (row.prompt_tokens, row.trace_tokens, row.prompt.traces[0].verified) == (3, (4,), True)
    claimed = dataclasses.replace(prompt("1"), traces=(Trace(RIGHT, "me", False), Trace(WRONG, "me", True)))
    (row,) = judge(grader, claimed, rules=UNVERIFIED)
    assert [trace.verified for trace in row.prompt.traces] == [True, False]
    assert row.outcomes == (Outcome.CORRECT, Outcome.WRONG)


@pytest.mark.parametrize(("template", "found"), [("r1_zero", Outcome.CORRECT), (None, Outcome.NO_ANSWER)])
def test_the_chat_template_decides_where_a_trace_answers(grader, template, found):
    tokenizer = build_tokenizer(["0123456789 so\\boxed{}<answer></answer>think\n"])
    if template is not None:
        tokenizer.chat_template = template_file(template).read_text()
    traces = ("<think>\n1</think> <answer>2</answer>", "<think>\n1</think> so <answer>2</answer> so")
    rows = RowFilter(tokenizer, Rules(999, 999, require_verified_traces=False), index_of())
    (row,) = rows.apply([prompt("1", *traces)], grader)
    assert row.outcomes == (found, found)


def test_logprobs_must_count_the_tokens_and_the_stop_token(grader):
    traces = (Trace(RIGHT, "me", logprobs=(-0.5,) * 4), Trace(RIGHT, "me", logprobs=(-0.5,) * 3))
    (row,) = judge(grader, dataclasses.replace(prompt("1"), traces=traces))
    assert [trace.logprobs for trace in row.prompt.traces] == [(-0.5,) * 4]
    assert [reason for _, reason in row.rejected_traces] == [Rejection.TRACE_LOGPROBS_MISMATCH]


def test_problems_of_a_suite_are_rejected_in_any_writing_and_traces_that_quote_one(grader):
    asked = dataclasses.replace(prompt("TWO  + 1"), messages=(Message("system", "now"), Message("user", "TWO\n+ 1")))
    rows = judge(grader, prompt("two + 1"), prompt("two + 2"), suite=(asked,))
    assert [row.reason for row in rows] == [Rejection.IN_SUITE, None]
    assert rows[0].hits[0][0] == "prompt" and rows[0].hits[0][1].benchmark == "suite"
    problem = " ".join(f"word{number}" for number in range(40))
    (row,) = judge(grader, prompt("1", f"As in {problem}: {RIGHT}", RIGHT), rules=LOOSE, suite=(prompt(problem),))
    assert [trace.text for trace in row.prompt.traces] == [RIGHT]
    assert list(row.hits) == [("trace", Hit("suite", 1, 1.0))]
    # A suite keeps no demonstration, and is not compared with itself.
    asked = prompt("1", RIGHT)
    (row,) = judge(grader, asked, rules=dataclasses.replace(RULES, keeps_traces=False), suite=(asked,))
    assert row.prompt == prompt("1") and row.reason is None


def test_the_system_prompt_does_not_change_the_identity_of_a_row():
    own = dataclasses.replace(prompt("1"), messages=(Message("system", "mine"), Message("user", "1")))
    behind = with_system_prompt([prompt("1"), own], "think")
    assert [row.messages[0].content for row in behind] == ["think", "mine"]
    assert {row.uid for row in behind} == {prompt_uid("t", row.messages) for row in behind} == {prompt("1").uid}


def test_traces_whose_judge_cannot_be_reached_are_not_rejected_but_asked_for_again():
    config = GradingConfig(kind=JudgeGrader(url="http://127.0.0.1:9/v1", model="m", retries=0))
    with GraderPool(1, PATIENCE_S, config) as judged, pytest.raises(LostError, match="1 of 1 traces have no verdict"):
        grade_traces([prompt("1 + 1", RIGHT)], judged)


@pytest.mark.slow
@needs_datasets
def test_truncated_real_traces_have_no_answer(grader):
    prompts = []
    for row in pq.read_table(DATASETS / "reasoning_traces/gsm8k_qwq32b.parquet").to_pylist():
        trace, truth = row["model_answers"]["thinking_model"], row["correct_answer"].rpartition("####")[2].strip()
        prompts.append(prompt(row["question"], f"<think>\n{trace}", truth=truth))
    tokenizer = build_tokenizer(texts_of(prompts))
    rows = RowFilter(tokenizer, Rules(4096, 16384), index_of()).apply(prompts, grader)
    outcomes = Counter(outcome for row in grade_traces(prompts, grader) for outcome in row)
    finished = sum("</think>" in row.traces[0].text for row in prompts)
    kept = [row.prompt for row in rows if row.reason is None]
    assert 0.8 * finished < len(kept) == sum(trace.verified is True for row in kept for trace in row.traces)
    assert all(row.traces[0].text.startswith("<think>\n") for row in kept)
    assert outcomes.total() == len(prompts)


MEETS_ITSELF, TEXT_ALONE = ("meets_itself", "correct"), ("text_alone", "unparsable")
NO_VALUE = ("fails", "unparsable")
NAMES_OF_NOTHING = ["proof", "Proof.", "notfound", "None", "nan", "inf", "-inf", "N/A", "?"]


@pytest.mark.parametrize(("finding", "named", "golds"), [
    (MEETS_ITSELF, None, ["033", "27.0", "\\frac{1}{2}", "$69$,$84$", "1,3,5", "$(1,8,19), (2,7,13), (4,5,7)$"]),
    (MEETS_ITSELF, None, ["\\text{Evelyn}", "DNE", "\\arcsin(10/13)", "3", "x\n#### 5", "#### 5"]),
    (MEETS_ITSELF, None, ['{"ground_truth": "5"}', "{'ground_truth': 5}", '["\\\\boxed{5}"]']),
    (("fails", "no_answer"), None, ["\\frac{1}{2"]), (TEXT_ALONE, None, ["np.arcsin(10/13)"]),
    # A word for no answer is no answer.
    (NO_VALUE, None, NAMES_OF_NOTHING), (NO_VALUE, None, [f"$\\text{{{gold}}}$" for gold in NAMES_OF_NOTHING]),
    (NO_VALUE, None, [f'{{"ground_truth": "{gold}"}}' for gold in NAMES_OF_NOTHING]),
    (NO_VALUE, "math_strict", NAMES_OF_NOTHING),
    # Each row is checked by its own grader.
    (MEETS_ITSELF, "choice", ["B"]), (NO_VALUE, "choice", ["Bee"]), (MEETS_ITSELF, "exact", ["Bee"]),
    (TEXT_ALONE, "math_strict", ["x+"]),
])  # fmt: skip
def test_references_are_graded_against_themselves(grader, finding, named, golds):
    rows = [prompt("?", truth=gold, grader=named) for gold in golds]
    assert check_golds(rows, grader, GradingConfig()) == [finding] * len(golds)


def test_the_grader_of_the_experiment_checks_rows_that_name_none():
    findings = ((STRICT, "meets_itself"), (EXACT, "meets_itself"), (CHOICE, "fails"), (FORMAT, "not_checked"))
    for kind, finding in findings:
        config = GradingConfig(kind=kind)
        with GraderPool(1, PATIENCE_S, config=config) as own:
            assert [found for found, _ in check_golds([prompt("?", truth="n+1")], own, config)] == [finding]


LONG = "Let n be a positive integer such that the sum of its digits is 17 and the product of them is as large as can be"
SHORT = "What is the sum of all whole numbers from 1 up to 100 that are odd + 3"
WHOLE, HALF = Hit("suite", 1, 1.0), len(LONG) // 2


def distance(one, other):
    """Jaccard's, over the sets of word triples; a shorter text is one run of all its words."""

    def runs(text):
        found = words(text)
        size = min(3, len(found)) or 1
        return {tuple(found[at : at + size]) for at in range(len(found) - size + 1)}

    union = runs(one) | runs(other)
    return 1 - len(runs(one) & runs(other)) / len(union) if union else 0.0


def test_the_estimate_of_similarity_is_as_good_as_its_formula_says():
    rng = random.Random(0)
    errors, spread = [], []
    for _ in range(300):
        one = [str(rng.randrange(10**6)) for _ in range(60)]
        other = [word if rng.random() > rng.random() * 0.2 else "x" + word for word in one]
        texts = " ".join(one), " ".join(other)
        true = 1 - distance(*texts)
        errors.append(similarity(*map(signature, texts)) - true)
        spread.append(true * (1 - true) / NUM_HASHES)
    assert abs(np.mean(errors)) < 0.01
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.sqrt(np.mean(spread)), rel=0.25)


def test_near_duplicates_name_the_first_of_their_cluster():
    rng = random.Random(1)
    texts = [" ".join(str(rng.randrange(10**6)) for _ in range(80)) for _ in range(200)]
    texts[150] = texts[20] + " 7"
    texts[170] = "8 " + texts[150]
    first = near_duplicate_clusters(np.array([signature(text) for text in texts]), 0.8)
    assert {row: int(first[row]) for row in np.flatnonzero(first != np.arange(200))} == {150: 20, 170: 20}
    assert signature("").shape == signature("one").shape == (NUM_HASHES,)
    assert near_duplicate_clusters(np.zeros((0, NUM_HASHES), dtype=np.uint16), 0.9).tolist() == []


@pytest.mark.parametrize(("problem", "texts", "hits"), [
    (LONG, [f"I recall: {LONG.upper()}. So", LONG[:HALF], "nothing", ""], [WHOLE, None, None, None]),
    (LONG, [LONG[:HALF], LONG[HALF:]], [None, None]),  # no run crosses from one text into the next
    (SHORT, [f"so: {SHORT} now", SHORT.replace("+ 3", "- 3")], [WHOLE, None]),  # a short one must be quoted whole
])  # fmt: skip
def test_a_quotation_is_found_and_a_shared_sentence_is_not(problem, texts, hits):
    assert index_of(prompt(problem)).find(texts) == hits
    # Equal problems match at any length.
    assert index_of(prompt("1  + 1")).equal(prompt("1 + 1")) == WHOLE
    assert index_of(prompt("1 + 1")).equal(prompt("1 + 2")) is None


def read(file, problem="problem"):
    fields = {"data_source": "d", "problem": problem, "answer": {"column": problem}}
    return load_file(DATASETS / file, fields=fields).prompts


@needs_datasets
def test_known_contamination_is_found():
    index, test_split = index_of(*read("math500/test.jsonl")), read("math_test5000/test.jsonl")

    def quoted(prompts):
        return [hit for hit in index.find([problem_text(each.messages) for each in prompts]) if hit]

    found = [*filter(None, map(index.equal, test_split)), *quoted(test_split)]
    assert len({hit.row for hit in found}) == 500
    old_aime = read("aime_1983_2023/train.jsonl")
    assert any(map(index.equal, old_aime)) and len(quoted(old_aime)) >= 6
    assert quoted(read("gsm8k/train.jsonl", "question")) == []
    # Real traces of test questions are found by their questions.
    index = index_of(*read("gsm8k/test.jsonl", "question"))
    assert all(index.equal(asked) for asked in read("reasoning_traces/gsm8k_qwq32b.parquet", "question"))


answer_texts = st.lists(st.sampled_from("abcde"), max_size=6).map(" ".join)
any_rule = st.builds(
    KeepAnswers, choose=st.sampled_from(["first", "shortest"]), max_per_prompt=st.integers(1, 6)
) | st.builds(KeepAnswers, choose=st.just("diverse"), max_per_prompt=st.integers(2, 6))


def answer(text, num_tokens=5):
    return Trace(text, "policy", verified=True, num_tokens=num_tokens)


NEAR, FAR = "first add 3 and 4 to get 7", "the result is simply seven"
OF_SEVEN = [answer("first add 3 and 4 to get seven"), answer(NEAR), answer(FAR)]


@pytest.mark.parametrize(("answers", "choose", "most", "expected"), [
    ([], "shortest", 4, []),
    ([answer("1 + 1\n= 2"), answer("1 + 1 = 2 "), answer("2")], "first", 3, ["1 + 1\n= 2", "2"]),
    ([answer("long", 9), answer("b", 3), answer("a", 3), answer("c", 4)], "shortest", 3, ["b", "a", "c"]),
    (OF_SEVEN, "diverse", 2, [OF_SEVEN[0].text, FAR]), (OF_SEVEN, "diverse", 9, [OF_SEVEN[0].text, FAR, NEAR]),
], ids=["none", "equal but for space", "shortest as sampled", "diverse", "diverse in order"])  # fmt: skip
def test_different_answers_are_kept_in_the_order_of_choice(answers, choose, most, expected):
    rule = KeepAnswers.model_validate({"choose": choose, "max_per_prompt": most})
    assert [each.text for each in kept_traces(answers, rule)] == expected
    # Case and punctuation make no distance; neither blanks nor undecodable bytes are text.
    assert farthest_first(["a b c d e", "A b, c d e", "a b c d f", ""], 4) == [0, 3, 2, 1]
    assert [is_text(each) for each in ("right", "  ", "\\boxed{2} \ufffd")] == [True, False, False]


@given(texts=st.lists(answer_texts, min_size=1, max_size=8), count=st.integers(1, 8))
def test_each_choice_is_the_farthest_from_those_before(texts, count):
    order = farthest_first(texts, count)
    assert order[0] == 0
    assert len(order) == len(set(order)) == min(count, len(texts))

    def nearest(index, chosen):
        return min(distance(texts[index], texts[other]) for other in chosen)

    for place in range(1, len(order)):
        before = order[:place]
        left = [index for index in range(len(texts)) if index not in before]
        best = max(nearest(index, before) for index in left)
        assert order[place] == next(index for index in left if nearest(index, before) == best)


@given(texts=st.lists(answer_texts, max_size=8), rule=any_rule)
def test_fewer_are_a_prefix_of_more(texts, rule):
    answers = [answer(text, len(text)) for text in texts]
    more = rule.model_copy(update={"max_per_prompt": rule.max_per_prompt + 1})
    found = kept_traces(answers, rule)
    assert found == kept_traces(answers, more)[: rule.max_per_prompt]
    assert len({" ".join(each.text.split()) for each in found}) == len(found) <= rule.max_per_prompt


def test_what_is_known_of_an_answer_is_written_and_read_back(tmp_path):
    known = {"model": "base", "decoding": "temperature 1", "logprobs": (-0.5, -0.25, 0.0, -1.0)}
    sampled = dataclasses.replace(answer(RIGHT, 4), **known)
    (trace,) = kept_traces([sampled], KeepAnswers())
    assert trace == sampled
    asked = dataclasses.replace(prompt("1+1"), traces=(trace,))
    write_prompts(tmp_path / "a.parquet", [asked])
    assert read_prompts(tmp_path / "a.parquet") == [asked]


BOUNDS = DifficultyConfig(
    num_samples=4, temperature=1.0, max_response_tokens=8, min_pass_rate=0.25, max_pass_rate=0.75, engine="transformers"
)
RATES = [
    PassRate("a", {"wrong": 3, "no_answer": 1}, num_tokens=20, num_truncated=2),
    PassRate("b", {"correct": 1, "wrong": 3}, num_tokens=12, num_truncated=0),
    PassRate("c", {"correct": 3, "unparsable": 1}, num_tokens=10, num_truncated=0),
    PassRate("d", {"correct": 4}, num_tokens=6, num_truncated=0),
]
FITS = [Fit.TOO_HARD, Fit.KEPT, Fit.KEPT, Fit.TOO_EASY]


@pytest.mark.parametrize("num_samples", [3, 7, 10, 64])
def test_the_bounds_of_pass_rates_are_inclusive(num_samples):
    assert [fit_of(rate, BOUNDS) for rate in RATES] == FITS
    for correct in range(num_samples + 1):
        share = correct / num_samples
        bounds = DifficultyConfig(num_samples=num_samples, min_pass_rate=share, max_pass_rate=share)
        outcomes = {"correct": correct, "wrong": num_samples - correct}
        assert fit_of(PassRate("a", outcomes, 0, 0), bounds) is Fit.KEPT


def test_pass_rates_have_one_row_per_prompt_and_their_card_counts_everything_once(tmp_path):
    answer_cards.write_pass_rates(tmp_path / "rates.parquet", RATES, FITS)
    rows = pq.read_table(tmp_path / "rates.parquet").to_pylist()
    assert list(rows[0]) == ["uid", "num_samples", "num_correct", "mean_tokens", "num_truncated", "fit"]
    assert tuple(rows[0].values()) == ("a", 4, 0, 5.0, 2, "too_hard")
    others = [("b", 1, "kept"), ("c", 3, "kept"), ("d", 4, "too_easy")]
    assert [(row["uid"], row["num_correct"], row["fit"]) for row in rows[1:]] == others
    found = answer_cards.difficulty_card("base", BOUNDS, RATES, FITS, ["sums", "sums", "", "sums"])
    assert found.fits == {"kept": 2, "too_hard": 1, "too_easy": 1}
    assert found.rates.histogram == {"0": 1, "1": 1, "2": 0, "3": 1, "4": 1}
    assert (found.rates.mean_pass_rate, found.rates.ever_solved_share) == (0.5, 0.75)
    assert (found.rates.mean_tokens, found.rates.truncated_share) == (3.0, 0.125)
    assert Counter(found.rates.outcomes) == Counter({"correct": 8, "wrong": 6, "no_answer": 1, "unparsable": 1})
    assert found.sources["sums"] == {"prompts": 3, "kept": 1, "mean_pass_rate": pytest.approx(5 / 12)}
    (tmp_path / "card.json").write_text(answer_cards.card_json(found))
    assert answer_cards.read_card(tmp_path / "card.json", answer_cards.DifficultyCard) == found
    assert json.loads(answer_cards.card_json(found))["policy"] == "base"

"""Rows are made of records, and files give back what was written."""

import json
from dataclasses import replace

import pytest
from synthetic.result_rows import result_row, sample_record

from luffy.errors import LuffyError
from luffy.evaluation.results import EvaluationResults, FormCounts, SamplingProtocol, read_results, write_results
from luffy.evaluation.sample_files import parse_record, record_line
from luffy.statistics.accuracy import accuracy

RECORD = sample_record("s", "a", prompt="p\n", response="r\u2028\\boxed{1}", answer="1", ground_truth="1", num_tokens=4)
WRONG = replace(RECORD, outcome="no_answer", correct=False, answer=None, finish_reason="length", num_tokens=10)


def test_a_row_counts_problems_responses_outcomes_and_truncation():
    records = [RECORD, replace(WRONG, sample=1), replace(WRONG, uid="b"), replace(WRONG, uid="b", sample=1)]
    row = result_row(records, 0.95)
    assert (row.num_problems, row.num_samples, row.accuracy) == (2, 2, 0.25)
    assert (row.outcomes["correct"], row.outcomes["no_answer"], row.outcomes["crashed"]) == (1, 3, 0)
    assert (row.mean_tokens, row.truncated_share) == (8.5, 0.75)
    assert row.pass_at_k == {"1": 0.25, "2": 0.5}


def test_pass_at_k_goes_up_to_the_number_of_samples_whether_or_not_it_is_a_power_of_two():
    row = result_row([RECORD, *(replace(WRONG, sample=sample) for sample in range(1, 10))], 0.95)
    assert list(row.pass_at_k) == ["1", "2", "4", "8", "10"]
    assert row.pass_at_k["10"] == 1.0


@pytest.mark.parametrize(
    ("reason", "share"),
    [("length", 1.0), ("turn_length", 1.0), ("stop", 0.0), ("turns", 0.0), ("environment_error", 0.0)],
)
def test_only_limits_of_tokens_cut_a_response_off(reason, share):
    assert result_row([replace(RECORD, finish_reason=reason)], 0.95).truncated_share == share


def test_a_row_says_what_its_interval_is_and_which_answer_wins():
    records = [
        replace(RECORD, uid=uid, sample=sample, answer=answer, correct=answer == "1")
        for uid, answers in {"a": "1122", "b": "2213", "c": "1111"}.items()
        for sample, answer in enumerate(answers)
    ]
    row = result_row(records, 0.95)
    assert row.maj_at_k == {"4": (0.5 + 0 + 1) / 3}
    assert row.pass_at_k["4"] == 1.0
    assert row.method == accuracy([2, 1, 4], 4, 0.95).method
    assert result_row(records[:1], 0.95).maj_at_k == {}


def test_two_graders_are_compared_on_the_same_responses():
    twice = replace(RECORD, grader="math", second_grader="math_strict", second_outcome="correct")
    verdicts = [(True, "correct"), (True, "wrong"), (True, "unparsable"), (False, "correct"), (False, "no_answer")]
    records = [replace(twice, uid=str(i), correct=a, second_outcome=b) for i, (a, b) in enumerate(verdicts)]
    agreement = result_row(records, 0.95).agreement
    assert agreement is not None
    assert (agreement.first, agreement.second, agreement.share) == ("math", "math_strict", 0.4)
    assert (agreement.only_first, agreement.only_second, agreement.second_accuracy) == (2, 1, 0.4)
    assert result_row([RECORD], 0.95).agreement is None


def test_a_multiple_choice_score_comes_with_what_guessing_gives():
    said = [("correct", 4), ("no_answer", 4), ("unparsable", 2), ("wrong", 2)]
    records = [
        replace(RECORD, uid=str(i), outcome=outcome, correct=outcome == "correct", grader="choice", num_options=options)
        for i, (outcome, options) in enumerate(said)
    ]
    row = result_row(records, 0.95)
    assert row.choices is not None
    assert (row.accuracy, row.choices.unparsed_share, row.choices.chance) == (0.25, 0.5, 0.375)
    assert row.choices.guess_adjusted == (1 + 1 / 4 + 1 / 2) / 4
    unknown = result_row([replace(record, num_options=None) for record in records], 0.95).choices
    assert unknown is not None
    assert (unknown.unparsed_share, unknown.guess_adjusted, unknown.chance) == (0.5, None, None)
    assert result_row([RECORD], 0.95).choices is None


def test_subjects_and_levels_are_rows_of_their_own_where_every_problem_has_one():
    records = [replace(RECORD, uid=str(i), subject="AB"[i % 2], correct=i < 2, level="5") for i in range(5)]
    row = result_row(records, 0.95)
    assert {name: (part.num_problems, part.accuracy) for name, part in row.by_subject.items()} == {
        "A": (3, 1 / 3),
        "B": (2, 0.5),
    }
    assert row.by_level["5"].interval == row.interval
    assert result_row([*records, replace(RECORD, uid="x")], 0.95).by_subject == {}


def test_records_of_an_earlier_version_are_read_and_what_they_lack_is_not_made_up():
    values = json.loads(record_line(RECORD))
    later = ("grader", "second_grader", "second_outcome", "subject", "level", "num_options", "confidential")
    assert parse_record(json.dumps({name: value for name, value in values.items() if name not in later})) == RECORD
    with pytest.raises(KeyError, match="seed"):
        parse_record(json.dumps({name: value for name, value in values.items() if name != "seed"}))


def test_a_missing_response_is_not_averaged_away():
    with pytest.raises(LuffyError, match="1 problems have fewer than 2 responses"):
        result_row([RECORD, replace(RECORD, sample=1), replace(RECORD, uid="b")], 0.95)


def test_files_give_back_what_was_written_and_one_of_another_kind_is_named(tmp_path):
    results = EvaluationResults(checkpoint="rl", confidence=0.9, rows=(result_row([RECORD], 0.9),))
    write_results(tmp_path / "results.json", results)
    assert read_results(tmp_path / "results.json") == results
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(LuffyError, match=r"results\.json: not the results"):
        read_results(tmp_path / "results.json")


IN_FORM = {"r1_zero": "<think>2</think> <answer>1</answer>", "luffy": "<think>2</think> It is \\boxed{1}."}


def forms_of(texts: list[tuple[str, bool]], template: str = "own") -> FormCounts | None:
    records = [replace(RECORD, uid=str(i), response=text, correct=right) for i, (text, right) in enumerate(texts)]
    protocol = SamplingProtocol(
        template=template, temperature=0.0, top_p=1.0, max_response_tokens=9, stop=(), engine="vllm"
    )
    return result_row(records, 0.95, protocol).form


def test_responses_are_counted_by_form_and_answer():
    """For the form that the template asks for; under another template, for the strictest form that occurs."""
    r1_zero, luffy = IN_FORM["r1_zero"], IN_FORM["luffy"]
    texts = [(r1_zero, True), (r1_zero, False), (r1_zero, False), (luffy, True), ("1", True), ("1", False)]
    strict = FormCounts(form="r1_zero", right_in_form=1, wrong_in_form=2, right_otherwise=2, wrong_otherwise=1)
    loose = FormCounts(form="luffy", right_in_form=2, wrong_in_form=2, right_otherwise=1, wrong_otherwise=1)
    assert forms_of(texts) == forms_of(texts, "r1_zero") == strict
    assert forms_of(texts, "luffy_think") == loose
    assert forms_of([(luffy, True)]) == FormCounts(
        form="luffy", right_in_form=1, wrong_in_form=0, right_otherwise=0, wrong_otherwise=0
    )
    assert forms_of([("1", True)]) is None
    asked = forms_of([("1", True)], "r1_zero")
    assert asked is not None
    assert (asked.right_otherwise, asked.right_in_form) == (1, 0)

"""Rows are made of records; files give back what was written; two evaluations are compared, and all are tables."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.refusals import refused
from synthetic.evaluated_workspace import first, write_evaluation
from synthetic.result_rows import result_row, sample_record

import luffy
from luffy.errors import DataError, LuffyError
from luffy.evaluation import sample_files
from luffy.evaluation.changes import find_changes
from luffy.evaluation.results import EvaluationResults, read_results, write_results
from luffy.evaluation.sample_files import (
    SAMPLES_FILE,
    SampleRecord,
    parse_record,
    read_sample_records,
    read_samples_of,
    record_line,
    write_sample_records,
)
from luffy.pipeline.workspace import Workspace
from luffy.statistics.accuracy import accuracy
from luffy.statistics.paired import compare_paired

RECORD = sample_record("s", "a", prompt="p\n", response="r\u2028\\boxed{1}", answer="1", ground_truth="1", num_tokens=4)
WRONG = replace(RECORD, outcome="no_answer", correct=False, answer=None, finish_reason="length", num_tokens=10)


def test_a_row_counts_problems_responses_outcomes_and_truncation():
    records = [RECORD, replace(WRONG, sample=1), replace(WRONG, uid="b"), replace(WRONG, uid="b", sample=1)]
    row = result_row(records, 0.95)
    assert (row.num_problems, row.num_samples, row.accuracy) == (2, 2, 0.25)
    assert (row.outcomes["correct"], row.outcomes["no_answer"], row.outcomes["crashed"]) == (1, 3, 0)
    assert (row.mean_tokens, row.truncated_share) == (8.5, 0.75)
    assert row.pass_at_k == {"1": 0.25, "2": 0.5}
    with pytest.raises(LuffyError, match="1 problems have fewer than 2 responses"):
        result_row(records[:3], 0.95)  # a missing one is not averaged away
    row = result_row([RECORD, *(replace(WRONG, sample=sample) for sample in range(1, 10))], 0.95)
    assert list(row.pass_at_k) == ["1", "2", "4", "8", "10"] and row.pass_at_k["10"] == 1.0
    for reason in ("length", "turn_length", "stop", "turns", "environment_error"):
        cut = result_row([replace(RECORD, finish_reason=reason)], 0.95).truncated_share
        assert cut == ("length" in reason), "only limits of tokens cut a response off"


def test_a_row_says_what_its_interval_is_which_answer_wins_and_what_guessing_gives():
    said = [
        (uid, *each) for uid, answers in {"a": "1122", "b": "2213", "c": "1111"}.items() for each in enumerate(answers)
    ]
    records = [replace(RECORD, uid=uid, sample=n, answer=answer, correct=answer == "1") for uid, n, answer in said]
    row = result_row(records, 0.95)
    assert (row.maj_at_k, row.pass_at_k["4"]) == ({"4": (0.5 + 0 + 1) / 3}, 1.0)
    assert row.method == accuracy([2, 1, 4], 4, 0.95).method
    assert result_row(records[:1], 0.95).maj_at_k == {}
    records = [
        replace(
            RECORD, uid=outcome, outcome=outcome, correct=outcome == "correct", grader="choice", num_options=options
        )
        for outcome, options in {"correct": 4, "no_answer": 4, "unparsable": 2, "wrong": 2}.items()
    ]
    row, unknown = (result_row([replace(each, **new) for each in records], 0.95) for new in ({}, {"num_options": None}))
    assert row.choices is not None and unknown.choices is not None
    assert (row.accuracy, row.choices.unparsed_share, row.choices.chance) == (0.25, 0.5, 0.375)
    assert row.choices.guess_adjusted == (1 + 1 / 4 + 1 / 2) / 4
    without = unknown.choices
    assert (without.unparsed_share, without.guess_adjusted, without.chance) == (0.5, None, None)
    assert result_row([RECORD], 0.95).choices is None


def test_subjects_and_levels_are_rows_of_their_own_where_every_problem_has_one():
    records = [replace(RECORD, uid=str(i), subject="AB"[i % 2], correct=i < 2, level="5") for i in range(5)]
    row = result_row(records, 0.95)
    found = {name: (part.num_problems, part.accuracy) for name, part in row.by_subject.items()}
    assert found == {"A": (3, 1 / 3), "B": (2, 0.5)}
    assert row.by_level["5"].interval == row.interval
    assert result_row([*records, replace(RECORD, uid="x")], 0.95).by_subject == {}


# Files of results and of graded responses: compressed, joined by their bytes, read one by one, and never half there.

RECORDS = [sample_record("s", f"p{i}", prompt="p\n", response=f"{i}\u2028" * 200) for i in range(50)]


def test_results_are_read_as_they_were_written_and_one_of_another_kind_is_named(tmp_path):
    results = EvaluationResults(checkpoint="rl", confidence=0.9, rows=(result_row([RECORD], 0.9),))
    write_results(tmp_path / "results.json", results)
    assert read_results(tmp_path / "results.json") == results
    former = results.model_dump(mode="json")
    former["rows"][0] |= {"agreement": {"first": "math", "second": "math_strict", "share": 1.0}, "form": None}
    (tmp_path / "results.json").write_text(json.dumps(former))
    assert read_results(tmp_path / "results.json") == results, "an earlier version compared two graders, too"
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(LuffyError, match=r"results\.json: not the results"):
        read_results(tmp_path / "results.json")


def test_records_of_an_earlier_version_are_read_with_more_or_fewer_fields_and_nothing_made_up(tmp_path):
    values = json.loads(record_line(RECORD)) | {"second_grader": "math_strict", "second_outcome": "wrong"}
    later = ("grader", "subject", "level", "num_options", "confidential")
    assert parse_record(json.dumps({name: value for name, value in values.items() if name not in later})) == RECORD
    with pytest.raises(KeyError, match="seed"):
        parse_record(json.dumps({name: value for name, value in values.items() if name != "seed"}))
    # Its file is not compressed, and read where there is no other.
    (tmp_path / "samples.jsonl").write_bytes(b"".join(map(record_line, RECORDS[:2])))
    assert list(read_samples_of(tmp_path)) == RECORDS[:2]
    write_sample_records(tmp_path / SAMPLES_FILE, RECORDS)
    assert list(read_samples_of(tmp_path)) == RECORDS


@pytest.mark.parametrize("block", [1, 5000, 4 << 20])
def test_samples_are_read_as_they_were_written_alone_and_joined_also_by_the_systems_tools(tmp_path, monkeypatch, block):
    """With one record in a block, several, all of them."""
    monkeypatch.setattr(sample_files, "_BLOCK_BYTES", block)

    def failing() -> Iterator[SampleRecord]:
        yield from RECORDS[:30]
        raise DataError("no more")

    with refused("no more"):
        write_sample_records(tmp_path / SAMPLES_FILE, failing())
    assert list(tmp_path.iterdir()) == [], "nothing is left of records that end in an error"
    one, other = tmp_path / "1.jsonl.zst", tmp_path / "2.jsonl.zst"
    write_sample_records(one, RECORDS[:20])
    write_sample_records(other, iter(RECORDS[20:]))
    write_sample_records(tmp_path / SAMPLES_FILE, RECORDS[:20], iter(RECORDS[20:]))
    assert list(read_sample_records(one)) == RECORDS[:20]
    assert list(read_samples_of(tmp_path)) == RECORDS
    assert (tmp_path / SAMPLES_FILE).read_bytes() == one.read_bytes() + other.read_bytes()
    lines = b"".join(map(record_line, RECORDS))
    assert len(lines) > block or (tmp_path / SAMPLES_FILE).stat().st_size < 0.2 * len(lines)
    if shutil.which("zstd") is None:
        pytest.skip("needs zstd")
    assert subprocess.run(["zstd", "-dc", tmp_path / SAMPLES_FILE], capture_output=True, check=True).stdout == lines


def test_a_damaged_or_missing_file_is_named_and_not_read_as_a_shorter_one(tmp_path):
    file = tmp_path / SAMPLES_FILE
    with refused("has no samples.jsonl.zst", error=DataError):
        list(read_samples_of(tmp_path))
    write_sample_records(file, RECORDS)
    whole = file.read_bytes()
    for damaged in (whole[:-20], b"{}\n" + whole):
        file.write_bytes(damaged)
        with refused("samples.jsonl.zst: holds no graded responses", error=DataError):
            list(read_samples_of(tmp_path))


# Two evaluations beside each other: which problems changed, and how the whole compares.


def evaluation(name: str, answers: dict[str, str], suite: str = "s") -> Any:
    """A finished evaluation of a model that answers the problems so, a letter a response; `1` is right."""
    saved = [
        sample_record(suite, uid, said == "1", sample=i, answer=said, ground_truth="1")
        for uid, all_said in answers.items()
        for i, said in enumerate(all_said)
    ]
    results = EvaluationResults(checkpoint="rl", confidence=0.95, rows=())
    return SimpleNamespace(directory=Path(name), results=results, saved=saved, records=lambda: iter(saved))


def test_the_largest_change_comes_first_and_shares_are_compared_over_other_numbers_of_responses():
    before = evaluation("a", {"p0": "1222", "p1": "2222", "p2": "1111", "p3": "1122"})
    after = evaluation("b", {"p0": "11", "p1": "22", "p2": "11", "p3": "21"})
    (part,) = find_changes(before, after).cells
    (problem,) = part.changed
    assert (problem.uid, problem.first.accuracy, problem.second.accuracy) == ("p0", 0.25, 1.0)
    assert [answer for answer, _ in problem.first.votes] == ["1", "2", "2", "2"]


def test_the_comparison_is_the_paired_one_over_the_problems_that_both_have():
    before = evaluation("a", {"only": "1", **{f"p{i}": "1" if i < 20 else "2" for i in range(40)}})
    after = evaluation("b", {"else": "1", **{f"p{i}": "1" if i % 3 else "2" for i in range(39, -1, -1)}})
    (part,) = find_changes(before, after).cells
    shares = [[float(i < 20) for i in range(40)], [float(i % 3 > 0) for i in range(40)]]
    assert part.comparison.paired == compare_paired(*shares, 1, 0.95)
    assert (part.only_first, part.only_second) == (1, 1)


def test_suites_and_references_that_differ_are_named_and_nothing_shared_is_an_error():
    before, other, again = (evaluation(name, {"p0": "1"}, suite) for name, suite in ("as", "bt", "cs"))
    both = SimpleNamespace(**vars(before) | {"records": lambda: iter(before.saved + other.saved)})
    assert find_changes(before, both).left_out == (("t", "greedy"),)
    with refused("a and b", "s, greedy", "t, greedy", error=DataError):
        find_changes(before, other)
    again.saved[0] = replace(again.saved[0], ground_truth="2")
    assert find_changes(before, again).cells[0].other_reference == 1
    # A confidential problem is marked, by its suite or by its record.
    for suite in ("GPQA_diamond", "s"):
        before, after = evaluation("a", {"p0": "1"}, suite), evaluation("b", {"p0": "2"}, suite)
        assert find_changes(before, after).cells[0].changed[0].may_be_shown == (suite == "s")
        after.saved[0] = replace(after.saved[0], confidential=True)
        assert not find_changes(before, after).cells[0].changed[0].may_be_shown


# Evaluations of a workspace as DataFrames.


@pytest.fixture
def workspace(tmp_path) -> Path:
    found = Workspace(tmp_path / "w")
    verdicts = {("sums", "greedy"): first(40), ("sums", "sampled"): lambda problem, sample: sample == 0}
    write_evaluation(found, "e1", verdicts)
    write_evaluation(found, "e2", {("sums", "greedy"): first(70)}, checkpoint="rl", day=2)
    return tmp_path / "w"


def test_every_result_is_a_row_with_its_protocol_and_interval(workspace):
    frame = luffy.load_results(workspace)
    greedy = frame[frame["decoding"] == "greedy"].set_index("evaluation")
    assert greedy["accuracy"].to_dict() == {"e1": 0.4, "e2": 0.7}
    assert (frame["low"] < frame["accuracy"]).all() and (frame["accuracy"] < frame["high"]).all()
    assert set(greedy["temperature"]) == {0.0} and set(greedy["num_problems"]) == {100}
    assert list(frame["ended"]) == sorted(frame["ended"], reverse=True)
    sampled = frame.set_index("decoding").loc["sampled"]
    assert (sampled["pass_at_k"], sampled["num_samples"]) == (1.0, 4)
    assert greedy["pass_at_k"].isna().all()  # of a single response
    problems = luffy.load_problem_results(workspace)
    sums = problems.groupby(["evaluation", "decoding"])[["correct", "num_samples"]].sum()
    shares = {("e1", "greedy"): 0.4, ("e1", "sampled"): 0.25, ("e2", "greedy"): 0.7}
    assert (sums["correct"] / sums["num_samples"]).to_dict() == shares


def test_every_column_is_documented_and_a_workspace_without_evaluations_is_an_error(workspace, tmp_path):
    for load in (luffy.load_results, luffy.load_problem_results):
        assert load.__doc__ is not None
        assert [name for name in load(workspace).columns if f"`{name}`" not in load.__doc__] == []
        with refused("no finished evaluation", error=DataError):
            load(tmp_path / "empty")

"""Rows are made of records, and files give back what was written."""

from dataclasses import replace
from pathlib import Path

import pytest

from luffy.errors import LuffyError
from luffy.evaluation.results import (
    EvaluationResults,
    SampleRecord,
    join_sample_records,
    read_results,
    read_sample_records,
    result_row,
    write_results,
    write_sample_records,
)

RECORD = SampleRecord(
    suite="s", decoding="d", uid="a", sample=0, seed=1, prompt="p\n", response="r\u2028\\boxed{1}", answer="1",
    ground_truth="1", outcome="correct", reason="", correct=True, finish_reason="stop", num_tokens=4,
)  # fmt: skip
WRONG = replace(RECORD, outcome="no_answer", correct=False, answer=None, finish_reason="length", num_tokens=10)


def test_a_row_counts_problems_responses_outcomes_and_truncation() -> None:
    records = [RECORD, replace(WRONG, sample=1), replace(WRONG, uid="b"), replace(WRONG, uid="b", sample=1)]
    row = result_row(records, 0.95)
    assert (row.num_problems, row.num_samples, row.accuracy) == (2, 2, 0.25)
    assert (row.outcomes["correct"], row.outcomes["no_answer"], row.outcomes["crashed"]) == (1, 3, 0)
    assert (row.mean_tokens, row.truncated_share) == (8.5, 0.75)
    assert row.pass_at_k == {"1": 0.25, "2": 0.5}


def test_a_missing_response_is_not_averaged_away() -> None:
    with pytest.raises(LuffyError, match="1 problems have fewer than 2 responses"):
        result_row([RECORD, replace(RECORD, sample=1), replace(RECORD, uid="b")], 0.95)


def test_files_give_back_what_was_written(tmp_path: Path) -> None:
    write_sample_records(tmp_path / "1.jsonl", [RECORD])
    write_sample_records(tmp_path / "2.jsonl", [WRONG, RECORD])
    join_sample_records(tmp_path / "all.jsonl", [tmp_path / "1.jsonl", tmp_path / "2.jsonl"])
    assert list(read_sample_records(tmp_path / "all.jsonl")) == [RECORD, WRONG, RECORD]
    results = EvaluationResults(checkpoint="rl", confidence=0.9, rows=(result_row([RECORD], 0.9),))
    write_results(tmp_path / "results.json", results)
    assert read_results(tmp_path / "results.json") == results


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(LuffyError, match=r"results\.json: not the results"):
        read_results(tmp_path / "results.json")

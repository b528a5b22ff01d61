"""Evaluations whose verdicts are chosen."""

from luffy.evaluation.finished import CheckpointScores
from luffy.evaluation.results import EvaluationResults
from luffy.evaluation.sample_records import SampleRecord
from synthetic.result_rows import result_row

PROBLEMS = 40


def evaluation(problems=PROBLEMS, **right):
    """Greedy, with the first `right[suite]` problems of each suite solved."""
    rows, correct = [], {}
    for suite, count in right.items():
        records = [record(suite, uid, uid < count) for uid in range(problems)]
        rows.append(result_row(records, 0.95))
        correct[suite, "greedy"] = {row.uid: int(row.correct) for row in records}
    return CheckpointScores(EvaluationResults(checkpoint="rl", confidence=0.95, rows=tuple(rows)), correct)


def record(suite, uid, correct):
    outcome = "correct" if correct else "wrong"
    return SampleRecord(
        suite=suite, decoding="greedy", uid=f"p{uid}", sample=0, seed=1, prompt="", response="", answer="1",
        ground_truth="1", outcome=outcome, reason="", correct=correct, finish_reason="stop", num_tokens=3,
    )  # fmt: skip

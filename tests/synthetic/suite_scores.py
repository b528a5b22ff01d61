"""Evaluations whose verdicts are chosen."""

from luffy.evaluation.results import CheckpointScores, EvaluationResults
from synthetic.result_rows import result_row, sample_record

PROBLEMS = 40


def evaluation(problems=PROBLEMS, **right):
    """Greedy, with the first `right[suite]` problems of each suite solved."""
    rows, correct = [], {}
    for suite, count in right.items():
        records = [sample_record(suite, f"p{uid}", uid < count) for uid in range(problems)]
        rows.append(result_row(records, 0.95))
        correct[suite, "greedy"] = {row.uid: int(row.correct) for row in records}
    return CheckpointScores(EvaluationResults(checkpoint="rl", confidence=0.95, rows=tuple(rows)), correct)

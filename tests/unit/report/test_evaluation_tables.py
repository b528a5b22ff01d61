"""`summary.md` says all that the results say, and nothing in it becomes markup."""

from dataclasses import replace

from synthetic.result_rows import result_row

from luffy.evaluation.results import EvaluationResults, ResultRow, SamplingProtocol
from luffy.evaluation.sample_records import SampleRecord
from luffy.report.evaluation_tables import render_summary

RECORD = SampleRecord(
    suite="math", decoding="hot", uid="a", sample=0, seed=1, prompt="p", response="r", answer="1", ground_truth="1",
    outcome="correct", reason="", correct=True, finish_reason="stop", num_tokens=4, grader="math",
    second_grader="math_strict", second_outcome="wrong", subject="Algebra | *x*", level="3",
)  # fmt: skip
WRONG = replace(RECORD, uid="b", correct=False, outcome="no_answer", answer=None, finish_reason="length")
PROTOCOL = SamplingProtocol(
    template="r1_zero", temperature=0.6, top_p=1.0, max_response_tokens=64, stop=("</answer>",), engine="vllm"
)


def rows() -> list[ResultRow]:
    sampled = [replace(record, sample=sample) for record in (RECORD, WRONG) for sample in range(2)]
    choice = replace(RECORD, suite="arc", grader="choice", num_options=4, second_grader=None, second_outcome=None)
    return [result_row(sampled, 0.95, PROTOCOL), result_row([choice, replace(choice, uid="b")], 0.95)]


def line(page: str, *beginning: str) -> list[str]:
    """The cells of the one table line that begins so."""
    (found,) = [text for text in page.splitlines() if text.startswith("| " + " | ".join(beginning) + " |")]
    return found.strip("| ").split(" | ")


def test_every_number_of_a_row_is_in_a_table() -> None:
    page = render_summary(EvaluationResults(checkpoint="rl", confidence=0.95, rows=tuple(rows())))
    assert page.startswith("# Evaluation of `rl`")
    scores = line(page, "math", "2", "2")
    assert scores[3] == "50.0"
    assert scores[-2:] == ["1: 50.0, 2: 50.0", "2: 50.0"]
    assert "Mean of these 2 accuracies, each suite counted once: 75.0." in page
    assert line(page, "math", "50.0", "50.0")[1:] == ["50.0", "50.0", "0.0", "0", "4", "math"]
    assert line(page, "math", "math, math\\_strict")[2:] == ["50.0", "2", "0", "0.0"]
    assert line(page, "arc", "100.0", "0.0")[1:] == ["100.0", "0.0", "100.0", "25.0"]
    assert line(page, "math", "r1\\_zero")[2:] == ["0.6", "1", "64", "'\\</answer\\>'", "vllm"]
    assert line(page, "math", "0", "0")[3:] == ["2", "2", "r1\\_zero"]
    assert line(page, "3", "2", "50.0")


def test_names_do_not_become_markup() -> None:
    page = render_summary(EvaluationResults(checkpoint="rl", confidence=0.95, rows=tuple(rows())))
    assert "| Algebra \\| \\*x\\* | 2 | 50.0 |" in page


def test_what_is_not_there_has_no_table() -> None:
    plain = result_row([replace(RECORD, second_grader=None, subject=None, level=None)], 0.95)
    page = render_summary(EvaluationResults(checkpoint="rl", confidence=0.95, rows=(plain,)))
    assert page.count("| suite |") == 2
    assert "Two graders" not in page
    assert "Mean of these" not in page
    assert "by subject" not in page


def test_a_suite_without_readable_answers_is_advised_on() -> None:
    silent = [replace(WRONG, finish_reason="stop"), replace(RECORD, uid="c", outcome="unparsable", correct=False)]
    found = EvaluationResults(checkpoint="rl", confidence=0.95, rows=(result_row(silent, 0.95),))
    assert "math: 100 % of the responses have no answer that the grader can read; does the prompt" in render_summary(
        found
    )
    answered = EvaluationResults(checkpoint="rl", confidence=0.95, rows=(result_row([RECORD, WRONG], 0.95),))
    assert "the grader can read" not in render_summary(answered)

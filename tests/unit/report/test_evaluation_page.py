"""`summary.md` and `summary.html` say all that the results say, alone in one file, and no name in them is markup."""

from dataclasses import replace

from synthetic.pages import stands_alone
from synthetic.result_rows import result_row, sample_record

from luffy.evaluation.results import EvaluationResults, ResultRow, SamplingProtocol
from luffy.report.evaluation_page import evaluation_page
from luffy.report.page import html, markdown

RECORD = sample_record(
    "math", "a", decoding="hot & <b>", num_tokens=4, grader="math",
    subject="<i>Algebra</i> | $x$", level="3",
)  # fmt: skip
WRONG = replace(RECORD, uid="b", correct=False, outcome="no_answer", answer=None, finish_reason="length", level="4")
PROTOCOL = SamplingProtocol(
    template="r1_zero", temperature=0.6, top_p=1.0, max_response_tokens=64, stop=("</answer>",), engine="vllm"
)


def rows() -> list[ResultRow]:
    sampled = [replace(record, sample=sample) for record in (RECORD, WRONG) for sample in range(2)]
    choice = replace(RECORD, suite="arc", grader="choice", num_options=4, subject=None, level=None)
    return [result_row(sampled, 0.9, PROTOCOL), result_row([choice, replace(choice, uid="b")], 0.9)]


def written(found: list[ResultRow]) -> tuple[str, str]:
    page = evaluation_page(EvaluationResults(checkpoint="rl", confidence=0.9, rows=tuple(found)))
    return html(page), markdown(page)


def line(page: str, *beginning: str) -> list[str]:
    """The cells of the one table line that begins so."""
    (found,) = [text for text in page.splitlines() if text.startswith("| " + " | ".join(beginning) + " |")]
    return found.strip("| ").split(" | ")


def test_every_number_of_a_row_is_in_a_table():
    _, page = written(rows())
    assert page.startswith("# Evaluation of RL")
    assert "the intervals, at 90 %, are over problems" in page
    scores = line(page, "math", "2", "2")
    assert scores[3].startswith("50.0 [") and scores[3].endswith("]")
    assert scores[-2:] == ["1: 50.0, 2: 50.0", "2: 50.0"]
    assert "Mean of these 2 accuracies, each suite counted once: 75.0." in page
    assert line(page, "math", "50.0", "50.0")[1:] == ["50.0", "50.0", "0.0", "0", "4", "math"]
    assert line(page, "arc", "100.0", "0.0")[1:] == ["100.0", "0.0", "100.0", "25.0"]
    assert line(page, "math", "r1_zero")[2:] == ["0.6", "1", "64", "'\\</answer>'", "vllm"]
    assert line(page, "3 1 problem")[1].startswith("100.0 [")
    assert "counts a response that names no option as a guess, and is not an accuracy" in page


def test_the_page_has_the_same_numbers_stands_alone_and_takes_no_name_for_markup():
    page, text = written(rows())
    read = stands_alone(page)
    assert {"Evaluation of RL", "hot & <b>", "math by subject", "math by level", "choice"} <= set(read.text)
    assert {"1: 50.0, 2: 50.0", "<i>Algebra</i> | $x$"} <= set(read.text)
    assert read.tags.count("img") == 3 and "b" not in read.tags and "<i>A" not in page
    assert "\\<i>Algebra\\</i> \\| $x$" in text
    assert (page, text) == written(rows())


def test_what_is_not_there_has_no_section():
    page, text = written(rows()[1:])
    assert page.count("<img") == 1
    for absent in ("by subject", "Mean of these"):
        assert absent not in page + text


def test_a_suite_without_readable_answers_is_advised_on():
    silent = [replace(WRONG, finish_reason="stop"), replace(RECORD, uid="c", outcome="unparsable", correct=False)]
    says = "math: 100 % of the responses have no answer that the grader can read; does the prompt"
    assert all(says in text for text in written([result_row(silent, 0.95)]))
    assert not any("the grader can read" in text for text in written([result_row([RECORD, WRONG], 0.95)]))

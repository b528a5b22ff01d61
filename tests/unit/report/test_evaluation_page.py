"""`summary.html`: the numbers of `summary.md` with plots, alone in one file, and no name in it is markup."""

from dataclasses import replace
from html.parser import HTMLParser

from synthetic.result_rows import result_row

from luffy.evaluation.results import EvaluationResults, ResultRow
from luffy.evaluation.sample_records import SampleRecord
from luffy.report.evaluation_page import render_page

RECORD = SampleRecord(
    suite="math", decoding="hot & <b>", uid="a", sample=0, seed=1, prompt="p", response="r", answer="1",
    ground_truth="1", outcome="correct", reason="", correct=True, finish_reason="stop", num_tokens=4, grader="math",
    second_grader="math_strict", second_outcome="wrong", subject="<i>x</i> $y", level="3",
)  # fmt: skip


def rows() -> list[ResultRow]:
    twice = [replace(RECORD, uid=uid, sample=i, correct=uid == "a", level="34"[uid == "a"]) for uid in "ab"
             for i in (0, 1)]  # fmt: skip
    plain = replace(RECORD, suite="arc", grader="choice", second_grader=None, subject=None, level=None, num_options=4)
    return [result_row(twice, 0.9), result_row([plain], 0.9)]


def page(found: list[ResultRow]) -> str:
    return render_page(EvaluationResults(checkpoint="rl", confidence=0.9, rows=tuple(found)))


class Text(HTMLParser):
    """The text outside of style sheets, and the tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += [data.strip()] if data.strip() else []


def test_every_measure_is_there_and_each_breakdown_has_a_plot() -> None:
    read = Text(page(rows()))
    assert {"Evaluation of RL", "hot & <b>", "math by subject", "math by level"} <= set(read.text)
    for cell in (
        "1: 50.0, 2: 50.0",
        "2: 50.0",
        "math, math_strict",
        "choice",
        "Mean of these 2 accuracies, each suite",
    ):
        assert any(text.startswith(cell) for text in read.text)
    assert "90 % intervals" in " ".join(read.text)
    assert read.tags.count("svg") == 3


def test_the_file_stands_alone_and_names_are_no_markup() -> None:
    html = page(rows())
    assert not {"script", "link", "img", "i", "b"} & set(Text(html).tags)
    assert "@import" not in html
    assert html == page(rows())


def test_what_is_not_there_has_no_section() -> None:
    html = page(rows()[1:])
    assert html.count("<svg") == 1
    assert "by subject" not in html
    assert "Two graders" not in html

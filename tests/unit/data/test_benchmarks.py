"""The shipped benchmarks over copies of the real data sets. No text of theirs is asserted or shown."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter
from support.installed import DATASETS, needs_datasets
from support.patience import PATIENCE_S

from luffy.config.data import FileSource, SourceConfig
from luffy.config.grading import ChoiceGrader, GradingConfig, MathGrader, StrictMathGrader
from luffy.config.load import resolve_recipes
from luffy.data.row_filters import check_golds
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, problem_of
from luffy.types import Outcome, Prompt
from tests.synthetic.loaded_source import load_source


def benchmark(name: str, file: Path) -> list[Prompt]:
    values: dict = {"data": {"train": {"kind": "recipe", "name": name, "file": str(file)}}}
    resolve_recipes(values, {}, "test.yaml")
    source: SourceConfig = TypeAdapter(SourceConfig).validate_json(json.dumps(values["data"]["train"]))
    loaded = load_source(source, "suites.b", 0)
    assert not loaded.quarantined
    return loaded.prompts


def test_arc_in_the_format_of_its_hub(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "question": "Q1", "choices": {"text": ["w", "x", "y"], "label": ["A", "B", "C"]}, "answerKey": "C"},
        {"id": "b", "question": "Q2", "choices": {"text": list("wxyz"), "label": list("1234")}, "answerKey": "2"},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "arc.parquet")
    one, two = benchmark("arc_challenge", tmp_path / "arc.parquet")
    assert (one.ground_truth, two.ground_truth) == ("C", "B")
    assert two.messages[0].content == "Q2\n\nA. w\nB. x\nC. y\nD. z"


def test_gpqa_in_the_format_of_its_hub(tmp_path: Path) -> None:
    incorrect = {f"Incorrect Answer {n}": f"w{n}" for n in (1, 2, 3)}
    row = {"Question": "Q", "Correct Answer": "r", **incorrect, "High-level domain": "Physics", "Writer": "n"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "gpqa.parquet")
    (prompt,) = benchmark("gpqa_diamond", tmp_path / "gpqa.parquet")
    assert f"{prompt.ground_truth}. r" in prompt.messages[0].content.splitlines()
    assert prompt.extra_info["confidential"] is True and prompt.extra_info["High-level domain"] == "Physics"


def test_several_answers_units_and_tolerance_of_olympiadbench_are_kept(tmp_path: Path) -> None:
    row = {
        "question": "Q", "final_answer": ["4.2", "5"], "subfield": "A", "answer_type": "Numerical",
        "is_multiple_answer": True, "unit": "%", "error": "1e-1",
    }  # fmt: skip
    (tmp_path / "o.jsonl").write_text(json.dumps(row))
    (prompt,) = benchmark("olympiadbench", tmp_path / "o.jsonl")
    assert prompt.ground_truth == "4.2, 5"
    assert (prompt.extra_info["unit"], prompt.extra_info["error"]) == ("%", "1e-1")


def graded(kind: MathGrader | StrictMathGrader, pairs: list[tuple[str, str]]) -> list[Outcome]:
    with GraderPool(1, PATIENCE_S) as grader:
        grades = grader.grade([GradeRequest(f"\\boxed{{{found}}}", gold, kind=kind) for gold, found in pairs])
    return [grade.outcome for grade in grades]


@pytest.mark.parametrize("kind", [MathGrader(), StrictMathGrader()], ids=lambda kind: kind.kind)
def test_benchmark_style_references_match_model_style_answers(kind):
    right = [("033", "33"), ("27", "27.0"), ("45", "45 \\text{ minutes}")]
    right += [("$69$,$84$", "84, 69"), ("1,3,5", "5, 3, 1"), ("$(6,3),(9,3)$", "(9,3),(6,3)")]
    wrong = [("033", "330"), ("$69$,$84$", "69"), ("1,3,5", "1,3"), ("$(6,3),(9,3)$", "(3,6),(3,9)")]
    found = graded(kind, right + wrong)
    unequal = [pair for pair, outcome in zip(right, found, strict=False) if outcome is not Outcome.CORRECT]
    assert unequal == [] and Outcome.CORRECT not in found[len(right) :]


@needs_datasets
@pytest.mark.parametrize(
    ("name", "file", "count"),
    [
        ("mmlu_pro", "mmlu_pro/test.parquet", 12_032),
        ("gsm8k", "gsm8k/train.jsonl", 7473),
        ("math", "math_test5000/test.jsonl", 5000),
        ("amc23", "amc23/test.jsonl", 40),
        ("olympiadbench", "olympiadbench/test.jsonl", 675),
        ("aime24", "aime24/test.jsonl", 30),
        ("aime25", "aime25/test.jsonl", 30),
        ("math500", "math500/test.jsonl", 500),
    ],
)
def test_real_benchmarks_have_their_published_number_of_problems(name: str, file: str, count: int) -> None:
    prompts = benchmark(name, DATASETS / file)
    assert len(prompts) == count == len({prompt.uid for prompt in prompts})


@needs_datasets
def test_mmlu_pro_has_three_to_ten_options_and_its_own_letters() -> None:
    prompts = benchmark("mmlu_pro", DATASETS / "mmlu_pro" / "test.parquet")
    letters = pq.read_table(DATASETS / "mmlu_pro/test.parquet", columns=["answer"])["answer"].to_pylist()
    assert Counter(prompt.ground_truth for prompt in prompts) == Counter(letters)
    numbers = Counter(prompt.extra_info["num_options"] for prompt in prompts)
    assert (min(numbers), max(numbers), numbers[10]) == (3, 10, 9982)  # type: ignore[type-var]
    with GraderPool(1, PATIENCE_S) as grader:
        check = check_golds(prompts, grader, GradingConfig())
        of_text = [GradeRequest(f"\\boxed{{{_right_text(p)}}}", p.ground_truth, problem_of(p)) for p in prompts[:500]]
        by_text = Counter(grade.outcome for grade in grader.grade(of_text))
    assert Counter(finding for finding, _ in check) == {"meets_itself": 12_032}
    assert by_text[Outcome.WRONG] <= 5


def _right_text(prompt: Prompt) -> str:
    options = prompt.extra_info["options"]
    assert isinstance(options, list)
    return str(options["ABCDEFGHIJ".index(prompt.ground_truth)])


@needs_datasets
def test_the_published_file_of_luffy_holds_six_benchmarks() -> None:
    path = str(DATASETS / "luffy_eval" / "valid.all.parquet")
    sizes = {"aime": 30, "aime25": 30, "amc": 83, "olympiad_bench": 675, "math": 500, "minerva": 272}
    for name, size in sizes.items():
        source = FileSource(kind="file", path=path, only={"data_source": name})
        prompts = load_source(source, f"suites.{name}", 0).prompts
        assert len({prompt.uid for prompt in prompts}) == size
        assert len(prompts) == size * (32 if name in ("aime", "aime25", "amc") else 1)


@needs_datasets
@pytest.mark.parametrize(("name", "count"), [("arc_c", 1172), ("gpqa", 198)])
def test_the_published_multiple_choice_files_of_luffy_can_be_graded_by_choice(name: str, count: int) -> None:
    source = FileSource(kind="file", path=str(DATASETS / "luffy_eval" / f"valid.{name}.parquet"), confidential=True)
    prompts = load_source(source, "suites.q", 0).prompts
    config = GradingConfig(kind=ChoiceGrader())
    with GraderPool(1, PATIENCE_S, config=config) as grader:
        check = check_golds(prompts, grader, config)
    assert Counter(finding for finding, _ in check) == {"meets_itself": count}

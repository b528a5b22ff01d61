"""`python -m luffy rescore` and `diff`, from the command line to what stands on the terminal."""

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic.result_rows import result_row, sample_record

from luffy.cli import main as command
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.grading import ExactGrader, GradingConfig, MathGrader
from luffy.config.settings import EvaluateSettings, SweepSettings
from luffy.data.parquet import write_prompts
from luffy.evaluation.results import EvaluationResults, read_results, write_results
from luffy.evaluation.sample_files import read_sample_records, write_sample_records
from luffy.pipeline.job import StageJob, write_job
from luffy.types import Message, Prompt

SECRET = "quark"


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def evaluation(folder: Path, answers: str, suite: str = "arc", gold: str = "B") -> Path:
    """A finished evaluation whose model said these letters, one a problem, in the sentence that a choice asks for."""
    records = [
        sample_record(
            suite, f"p{i}", letter == gold, response=f"{SECRET}\nANSWER: {letter}", answer=letter, ground_truth=gold,
            grader="choice",
        )
        for i, letter in enumerate(answers)
    ]  # fmt: skip
    folder.mkdir()
    write_sample_records(folder / "samples.jsonl.zst", records)
    rows = (result_row(records, 0.95),)
    write_results(folder / "results.json", EvaluationResults(checkpoint="rl", confidence=0.95, rows=rows))
    return folder


def with_data(
    folder: Path, data: Path, count: int, named: dict[str, MathGrader | ExactGrader], *, sweep: bool = False
) -> None:
    (data / "suites").mkdir(parents=True)
    question = Message("user", "Which one?\nA. one\nB. two\nC. three")
    prompts = [Prompt(f"p{i}", "arc", (question,), "B", extra_info={"options": ["one", "two", "three"]})
               for i in range(count)]  # fmt: skip
    write_prompts(data / "suites" / "arc.parquet", prompts)
    settings = EvaluateSettings(
        seed=0, dtype="float32", evaluation=EvaluationConfig(max_response_tokens=8), grading=GradingConfig(named=named)
    )
    job = StageJob(
        node="sweep" if sweep else "evaluate_rl", stage="sweep" if sweep else "evaluate", key="k",
        settings=SweepSettings(protocol=settings, steps=(2,)) if sweep else settings,
        inputs={"data": str(data)}, upstream={},
        execution=ExecutionConfig(), tracking=TrackingConfig(),
    )  # fmt: skip
    write_job(folder / "config.yaml", job)


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_rescore_writes_a_summary_and_prints_what_changed(tmp_path, capsys):
    stage = evaluation(tmp_path / "it", "BCB")
    with_data(stage, tmp_path / "data", 3, {})
    assert command.main(["rescore", str(stage), "--grader", "math"]) == 0
    shown = lines(capsys)
    scores = [word for word in shown[2] if not word.endswith((",", "]"))]
    assert scores == ["arc", "greedy", "66.7", "0.0", "+0", "-2"]
    assert ["arc", "p0", "0", "B", "correct:", "B", "no_answer", "no", "box,", "or", "an", "empty", "one"] in shown
    folder = stage / "rescored" / "math"
    assert read_results(folder / "results.json").rows[0].accuracy == 0
    assert [record.grader for record in read_sample_records(folder / "samples.jsonl.zst")] == ["math"] * 3
    assert (folder / "summary.md").is_file()
    assert read_results(stage / "results.json").rows[0].accuracy == pytest.approx(2 / 3)


def test_rescore_takes_graders_by_the_evaluations_own_names_and_with_settings(tmp_path):
    stage = evaluation(tmp_path / "it", "BCB")
    with_data(stage, tmp_path / "data", 3, {"letters": MathGrader(boxed="preferred")})
    for grader in ("letters", "{kind: math, boxed: preferred}", "choice"):
        out = tmp_path / grader[:3]
        assert command.main(["rescore", str(stage), "--grader", grader, "--out", str(out)]) == 0
        assert read_results(out / "results.json").rows[0].accuracy == pytest.approx(2 / 3)


def test_rescore_leaves_multiple_choice_beside_other_suites_as_it_is(tmp_path, capsys):
    stage = evaluation(tmp_path / "it", "BCB")
    records = list(read_sample_records(stage / "samples.jsonl.zst"))
    boxed = [replace(r, suite="sums", grader="math", response="\\boxed{3}", ground_truth="3") for r in records]
    write_sample_records(stage / "samples.jsonl.zst", [*records, *boxed])
    rows = (result_row(records, 0.95), result_row(boxed, 0.95))
    write_results(stage / "results.json", EvaluationResults(checkpoint="rl", confidence=0.95, rows=rows))
    assert command.main(["rescore", str(stage), "--grader", "math_strict", "--out", str(tmp_path / "all")]) == 0
    assert "arc: multiple choice, left as it is; --suite arc grades it, too" in capsys.readouterr().out
    assert {r.suite for r in read_sample_records(tmp_path / "all" / "samples.jsonl.zst")} == {"sums"}
    asked = ["rescore", str(stage), "--grader", "math_strict", "--suite", "arc", "--out", str(tmp_path / "one")]
    assert command.main(asked) == 0
    assert {r.suite for r in read_sample_records(tmp_path / "one" / "samples.jsonl.zst")} == {"arc"}


def test_a_step_of_a_sweep_is_rescored_with_the_questions_of_its_stage(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    step = evaluation(sweep / "step_000002", "BCB")
    with_data(sweep, tmp_path / "data", 3, {}, sweep=True)
    assert command.main(["rescore", str(step), "--grader", "choice"]) == 0
    assert "graded without" not in capsys.readouterr().out


def test_a_long_grader_has_a_folder_and_without_the_order_of_the_stage_says_what_it_lacks(tmp_path, capsys):
    stage = evaluation(tmp_path / "it", "BCB")
    longest = "{kind: any, of: [" + ", ".join(["{kind: math, boxed: preferred}"] * 20) + "]}"
    assert command.main(["rescore", str(stage), "--grader", longest]) == 0
    assert "graded without the questions and their options" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--grader", "mathe"],
            "--grader mathe: no such grader; there are choice, code, environment, exact, math, math_strict",
        ),
        (["--grader", "{kind: math, boxed: never}"], "no such grader"),
        (["--grader", "{"], "no such grader"),
        (["--grader", "math", "--suite", "arcc"], "--suite arcc: is not in this evaluation; there are arc"),
        (["--grader", "choice", "--out", __file__], "cannot be made"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, arguments, message):
    stage = evaluation(tmp_path / "it", "BCB")
    assert command.main(["diff", "smoke-1", str(stage)]) == 2
    assert "smoke-1: is no finished evaluation" in capsys.readouterr().err
    assert command.main(["rescore", str(stage), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (stage / "rescored").exists()


def test_diff_has_the_comparison_at_its_head_and_both_answers_below_gains_first(tmp_path, capsys):
    first, second = evaluation(tmp_path / "a", "BBCA"), evaluation(tmp_path / "b", "BABA")
    assert command.main(["diff", str(first), str(second)]) == 0
    shown = lines(capsys)
    assert shown[2][:6] == ["arc", "greedy", "4", "50.0", "50.0", "+0.0"]
    assert "1/2/1" in shown[2]
    gain, loss = ["p2", "B", "0/1", "1/1", "C", "B"], ["p1", "B", "1/1", "0/1", "B", "A"]
    assert [line for line in shown if line[:1] in (["p1"], ["p2"])] == [gain, loss]
    assert ["p0"] not in [line[:1] for line in shown]


def test_diff_shows_as_many_as_it_is_asked_for(tmp_path, capsys):
    first, second = evaluation(tmp_path / "a", "CCCC"), evaluation(tmp_path / "b", "BBBB")
    assert command.main(["diff", str(first), str(second), "--show", "1"]) == 0
    out = capsys.readouterr().out
    assert "arc, greedy: 1 of 4 changed" in out
    assert "p1" not in out


@pytest.mark.parametrize("arguments", [["diff", "a", "b"], ["rescore", "a", "--grader", "math"]])
def test_confidential_problems_are_named_and_nothing_else_of_them_is_shown(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    for folder, answers in (("a", ["hush", SECRET]), ("b", [SECRET, "hush"])):
        evaluation(Path(folder), "BB", suite="gpqa_diamond", gold=SECRET)
        records = list(read_sample_records(Path(folder) / "samples.jsonl.zst"))
        told = [
            replace(record, answer=answer, correct=answer == "hush", reason=SECRET)
            for record, answer in zip(records, answers, strict=True)
        ]
        write_sample_records(Path(folder) / "samples.jsonl.zst", told)
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "p0" in out
    assert "(confidential)" in out
    assert SECRET not in out
    assert "hush" not in out


def test_the_order_and_the_repetition_of_steps_do_not_matter(tmp_path, capsys) -> None:
    printed = []
    for steps in ("6,2,4,2", "2,4,6"):
        assert command.main(["evaluate", "smoke", "--steps", steps, "--dry-run", "--workspace", str(tmp_path)]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "sweep" in printed[0]

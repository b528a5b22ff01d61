"""Saved responses graded again as if the other grader had been there from the start, and files of other systems."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.answered_stage import evaluating, number_in, stage_context, use, write_inputs
from synthetic.arithmetic import problems
from synthetic.loaded_source import write_rows

import luffy
from luffy.cli import main as command
from luffy.config.evaluation import DecodingConfig, SuiteConfig
from luffy.config.grading import GraderKind, GradingConfig, JudgeGrader, MathGrader, StrictMathGrader
from luffy.data.parquet import write_prompts
from luffy.errors import LostError
from luffy.evaluation.regrading import read_problems, read_responses, regrade
from luffy.evaluation.results import EvaluationResults, read_evaluation
from luffy.grading.pool import GraderPool
from luffy.report.evaluation_page import write_summaries
from luffy.stages.evaluate import run

STRICT, LENIENT = StrictMathGrader(), MathGrader(boxed="preferred")


def answer(prompt: str, seed: int) -> str:
    """Three forms of the right answer: in a box, without one, and as math_strict does not read it."""
    right = number_in(prompt) + 1
    return (f"\\boxed{{{right}}}", f"The answer is {right}", f"\\boxed{{{right}.0000000000001}}")[(right - 1) % 3]


@pytest.fixture
def evaluated(tmp_path, monkeypatch) -> Callable[..., Path]:
    """`evaluated(name, kind)`: what the stage writes with a grader of that kind."""
    inputs = write_inputs(tmp_path)
    use(monkeypatch, answer)

    def by(name: str, kind: GraderKind) -> Path:
        asked = {"decodings": {"greedy": DecodingConfig(temperature=0.0)}, "only": ("base",)}
        settings = evaluating(**asked, suites={"base": SuiteConfig(grader=kind)}, max_response_tokens=32)
        run(settings, stage_context("evaluate_sft", tmp_path / name, inputs))
        return tmp_path / name

    return by


@pytest.mark.parametrize(("before", "after"), [(MathGrader(), LENIENT), (LENIENT, STRICT), (STRICT, MathGrader())])
def test_the_result_is_that_of_an_evaluation_with_the_other_grader(tmp_path, evaluated, before, after):
    evaluation = read_evaluation(evaluated("before", before))
    with GraderPool(1, PATIENCE_S) as pool:
        regrade(tmp_path / "after", evaluation, ["base"], {}, after, pool, write_summaries)
    other = evaluated("from_the_start", after)
    for name in ("samples.jsonl.zst", "results.json"):
        assert (tmp_path / "after" / name).read_bytes() == (other / name).read_bytes()
    assert (tmp_path / "after" / "summary.md").read_text().startswith("# Evaluation of SFT")


def test_the_questions_come_from_the_prepared_suites_and_from_the_validation_split_beside_them(tmp_path):
    suites = tmp_path / "suites"
    suites.mkdir()
    write_prompts(suites / "sums.parquet", problems(2))
    write_prompts(tmp_path / "validation.parquet", problems(1))
    found = read_problems(suites, ["sums", "validation"])
    asked = {("sums", "p0"): "0 +1", ("sums", "p1"): "1 +1", ("validation", "p0"): "0 +1"}
    assert {key: problem.question for key, problem in found.items()} == asked
    with refused("others.parquet"):
        read_problems(suites, ["others"])


def test_without_its_judge_nothing_is_written_and_what_is_no_evaluation_is_refused(tmp_path, evaluated):
    folder = evaluated("before", MathGrader())
    judge = JudgeGrader(url="http://127.0.0.1:9/v1", model="m", retries=0)
    with GraderPool(1, PATIENCE_S) as pool, pytest.raises(LostError, match="4 of 4 responses have no verdict"):
        regrade(tmp_path / "after", read_evaluation(folder), ["base"], {}, judge, pool, write_summaries)
    assert not list((tmp_path / "after").iterdir())
    with refused("no finished evaluation", "results.json"):
        read_evaluation(tmp_path)
    (folder / "samples.jsonl.zst").unlink()
    with refused("samples.jsonl.zst"):
        list(read_evaluation(folder).records())


# `luffy evaluate --responses`: files of other systems, graded into the workspace.

THINK = "<|im_start|>assistant\n<think>\n"


def box(*answers: int) -> list[str]:
    return [f"So \\boxed{{{answer}}}." for answer in answers]


def responses_graded(folder: Path, *arguments: str) -> tuple[EvaluationResults, Path]:
    assert command.main(["evaluate", *arguments, "--workspace", str(folder / "ws")]) == 0
    newest = max((folder / "ws/runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)
    directory = newest / "stages/evaluate_responses"
    return read_evaluation(directory).results, directory


def verl(n: int, *answers: int, source: str = "aime", **extra: object) -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"What is {n}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(n)},
        "extra_info": {"index": n, **extra},
        "responses": box(*answers),
    }


def theirs(n: int, text: str) -> dict:
    return {"prompt": f"{n}?{THINK}", "generated_text": text, "answer": str(n)}


FILES = {
    # name: (rows, suite, problems, responses a problem, accuracy)
    "main_eval.parquet": ([verl(1, 1, 1, 3), verl(2, 2, 3, 4)], "aime", 2, 3, 0.5),
    "luffy.decoded.jsonl": (
        # `<think>` is opened by their prompt; repeated problems are joined, and a thought that never ends is no answer.
        [
            theirs(1, "1</think>\\boxed{1}"), theirs(2, "\\boxed{2}"),
            theirs(1, "\\boxed{1}"), theirs(2, "</think>\\boxed{2}"),
        ],
        "luffy.decoded", 2, 2, 0.5,
    ),
    "mine.jsonl": (
        [{"problem": f"{n}?", "answer": n, "response": box(n)[0], "subject": "Algebra"} for n in range(5)],
        "mine", 5, 1, 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_system_is_graded(tmp_path: Path, name: str) -> None:
    rows, suite, num_problems, num_samples, accuracy = FILES[name]
    results, _ = responses_graded(tmp_path, "--responses", str(write_rows(tmp_path / name, *rows)))
    (row,) = results.rows
    assert (row.suite, row.num_problems, row.num_samples) == (suite, num_problems, num_samples)
    assert row.accuracy == pytest.approx(accuracy) and row.interval[0] <= accuracy <= row.interval[1]
    assert row.by_subject.keys() == ({"Algebra"} if suite == "mine" else set())


def test_two_suites_that_would_get_one_name_are_refused(tmp_path):
    write_rows(tmp_path / "a.parquet", verl(0, 0, source="suite/1"), verl(1, 1, source="suite 1"))
    with refused("a.parquet, row 2", "'suite 1' and 'suite/1'", "suite_1"):
        read_responses([tmp_path / "a.parquet"], GradingConfig())


def test_the_result_is_found_by_all_that_look_for_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def rows(right: int) -> list[dict]:
        return [verl(n, n if n < right else -1, subject=f"s{n % 2}", source=f"suite/{n % 2}") for n in range(8)]

    for name, right in (("weak", 2), ("strong", 8)):
        write_rows(tmp_path / f"{name}.parquet", *rows(right))
        results, directory = responses_graded(
            tmp_path, "--responses", str(tmp_path / f"{name}*.parquet"), "--model", f"org/{name}"
        )
        assert [row.suite for row in results.rows] == ["suite_0", "suite_1"]
        assert (directory / "summary.md").is_file()
    workspace = ["--workspace", str(tmp_path / "ws")]
    capsys.readouterr()
    assert command.main(["show", "--leaderboard", *workspace]) == 0
    shown = capsys.readouterr().out
    assert "elsewhere; 95 %" in shown and shown.index("strong") < shown.index("weak") and "left out" not in shown
    assert command.main(["show", "org-strong", *workspace]) == 0
    assert "100.0" in capsys.readouterr().out
    assert luffy.load_results(tmp_path / "ws")["temperature"].isna().all()
    stages = [str(tmp_path / f"ws/runs/org-{name}-1/stages/evaluate_responses") for name in ("weak", "strong")]
    assert command.main(["diff", *stages]) == 0
    assert command.main(["rescore", stages[0], "--grader", "math_strict"]) == 0
    assert command.main(["gc", *workspace]) == 0
    capsys.readouterr()
    asked = ["evaluate", "--responses", str(tmp_path / "weak.parquet"), "--model", "org/weak", *workspace]
    assert command.main(asked) == 0
    assert "graded before" in capsys.readouterr().out and len(list((tmp_path / "ws/runs").iterdir())) == 2


def test_an_experiment_says_how_to_grade(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "d.jsonl", {"problem": "1?", "answer": "1", "response": "The answer is 1."})
    results, _ = responses_graded(tmp_path, "--responses", str(file))
    assert [row.accuracy for row in results.rows] == [0.0]
    own = "grading.kind={kind: math, boxed: preferred}"
    results, _ = responses_graded(tmp_path, "arithmetic", own, "--responses", str(file))
    assert [row.accuracy for row in results.rows] == [1.0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([verl(1, 1), {**verl(2, 2), "responses": None}], "row 2, field responses: is missing"),
        ([verl(1, 1), {**verl(2, 2), "responses": [[-1.5, False]]}], "row 2, field responses: must be"),
        ([{**verl(1, 1), "prompt": None}], "row 1, field prompt: is missing"),
        ([{**verl(1, 1), "reward_model": {"style": "rule"}}], "row 1, field reference: is missing"),
        ([{**verl(1, 1), "reward_model": {"style": "me", "ground_truth": "1"}}], "row 1, field reward_model.style: me"),
        ([verl(1, 1), verl(2, 2), verl(3, 3, 3)], "row 3: 2 responses, where most problems of aime have 1"),
        ([verl(1, 1), {**verl(1, 1), "reward_model": {"ground_truth": "2"}}], "row 2: another reference answer than"),
        *(([{**verl(1, 1), name: {}}], f"row 1, field {name}: files of other harnesses") for name in ("doc", "resps")),
        ([], ": no row"),
    ],
)
def test_a_bad_row_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, rows: list[dict], message: str) -> None:
    file = write_rows(tmp_path / "d.jsonl", *rows)
    assert command.main(["evaluate", "--responses", str(file), "--workspace", str(tmp_path / "ws")]) == 2
    error = capsys.readouterr().err
    assert f"{file}" in error and message in " ".join(error.split()) and not (tmp_path / "ws/runs").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--responses", "x.jsonl", "--steps", "2"], "--steps has no effect with --responses"),
        (["--responses", "x.jsonl"], "no such file"),
        (["--responses", "*.jsonl"], "no such file"),
        (["--responses", "x.txt"], "'.txt'"),
        ([], "--model"),
    ],
)
def test_options_that_do_nothing_and_missing_files_are_refused(tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert command.main(["evaluate", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_what_verls_trainer_dumps_is_read_prompts_that_its_template_has_written_and_no_uid(tmp_path):
    rows = [
        {"input": f"<|im_start|>user\n{n} + 1?<|im_end|>\n<|im_start|>assistant\n", "output": said, "gts": str(n + 1)}
        | {"score": 0.0, "step": 10}
        for n in range(2)
        for said in box(1, 2)
    ]
    problems = read_responses([write_rows(tmp_path / "10.jsonl", *rows)], GradingConfig())
    assert [(problem.prompt.ground_truth, problem.is_rendered) for problem in problems] == [("1", True), ("2", True)]
    assert all(problem.responses == box(1, 2) for problem in problems)

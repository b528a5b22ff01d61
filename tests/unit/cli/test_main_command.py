"""`plan`, `rescore`, `diff` and mistakes of every command: the numbers on the terminal, and the exit code."""

import errno
import re
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic.finished_stages import finish
from synthetic.result_rows import result_row, sample_record

from luffy.cli import main as command
from luffy.cli import planning
from luffy.config import load_experiment
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.grading import GradingConfig, MathGrader
from luffy.config.settings import EvaluateSettings, SweepSettings
from luffy.data.parquet import write_prompts
from luffy.evaluation.results import EvaluationResults, read_results, write_results
from luffy.evaluation.sample_files import read_sample_records, write_sample_records
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.job import StageJob, write_job
from luffy.pipeline.workspace import Workspace
from luffy.types import Message, Prompt

SECRET = "quark"
SEVEN_B = "exp_configs/luffy_qwen2.5_math_7b.yaml"
OWN_DATA = ["data.train={kind: file, path: data/samples/shop_train.jsonl}"] + [
    f"data.suites.{name}={{kind: file, path: data/samples/shop_test.jsonl}}"
    for name in load_experiment(SEVEN_B).data.suites
]
AROUND = ["compare", "smoke", "chain=sft", "method=sft", "--over", "sft.num_traces=[4, 8]", "--seed", "1", "--dry-run"]


@pytest.fixture(autouse=True)
def surroundings(request, tmp_path, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("LUFFY_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    without_code = lambda *args, **kwargs: open_experiment(*args, **{**kwargs, "code": lambda kind, rooms: {}})  # noqa: E731
    monkeypatch.setattr(planning, "open_experiment", without_code)


@pytest.fixture
def luffy(capsys):
    """What a command prints, with single blanks; of a mistake, its one line and nothing else."""

    def run(*arguments: str, code: int = 0) -> str:
        assert command.main(list(arguments)) == code
        captured = capsys.readouterr()
        if code:
            assert captured.err.count("\n") == 1 and captured.out == ""
        return re.sub(" +", " ", captured.err if code else captured.out)

    return run


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        (["plan", "exp_configs/smoke.yaml", "--verify", "chain=sft"], {"first run": 6, "evaluate_rl": 0}),
        (["plan", "grid_sft_size"], {" sft ": 4 * 3}),
        (AROUND, {"smoke.grid 1 (sft.num_traces=4)": 4, "smoke.grid 1 (sft.num_traces=8)": 2}),
        (["plan", SEVEN_B, *OWN_DATA],
         {"shared GPU in an update (x 8), estimate in GiB": 1, "gradients 3.5 float32: 4 bytes per parameter / 8": 1,
          "total 41.2 of 79.0": 1, "GPUs needed": 1}),
        # What all arms of a comparison need is said once.
        (["plan", "compare_qwen2.5_math_7b"], {"GPU in SFT (x 8), estimate in GiB": 1, "GPUs needed": 1}),
    ],
)  # fmt: skip
def test_a_plan_has_a_line_a_stage_and_says_what_it_needs(luffy, arguments, counts):
    out = luffy(*arguments)
    assert {text: out.count(text) for text in counts} == counts, out


def test_the_order_and_the_repetition_of_steps_do_not_matter(luffy):
    printed = [luffy("evaluate", "smoke", "--steps", steps, "--dry-run") for steps in ("6,2,4,2", "2,4,6")]
    assert printed[0] == printed[1] and "sweep" in printed[0]


def test_the_plan_of_a_tuned_comparison_has_its_tuning_runs_and_says_how_many_follow(luffy):
    out = luffy("plan", "compare_tuned", "seeds=[11, 12]")
    assert "18 runs for tuning, then 12 with the chosen values" in out
    stages = re.findall(r"(\w+) [0-9a-f]{16} run", out)
    # One SFT for both arms that go on with it and all of their tries.
    expected = {"base": 1, "evaluate_base": 1, "sft": 3 + 1, "rl": 15}
    assert {name: stages.count(name) for name in expected} == expected


def test_what_cannot_fit_is_shown_and_refused(capsys):
    assert command.main(["plan", SEVEN_B, *OWN_DATA, "execution.gradient_checkpointing=false"]) == 2
    captured = capsys.readouterr()
    assert re.search(r"total +\d+\.\d +of 79\.0: does not fit", captured.out) and "first run" not in captured.out
    (complaint,) = captured.err.splitlines()
    assert "execution.gradient_checkpointing: true" in complaint


def test_a_plan_shows_how_long_the_most_similar_finished_result_took(tmp_path, luffy):
    for overrides in (["rl.prompts_per_step=8", "rl.optimizer.lr=1e-4"], []):
        experiment = planning.open_experiment(load_experiment("smoke", overrides), Workspace(tmp_path))
        for name in ("prepare_data", "base", "sft"):
            finish(experiment, name)
        similar = finish(experiment, "rl")
    out = luffy("plan", "smoke", "rl.optimizer.lr=1e-5")
    assert re.search(r"^rl .* 1m00s .*lr ", out, re.MULTILINE)
    assert f"most similar finished result of this experiment (rl {similar.identity.key})" in " ".join(out.split())


# Mistakes: one line, and exit code 2.


@pytest.mark.parametrize("name", ["grid_sft_size", "compare_tuned", "study_smoke"])
@pytest.mark.parametrize("task", ["run", "config"])
def test_a_file_of_many_runs_is_not_taken_for_an_experiment(luffy, task, name):
    assert luffy(task, name, code=2).endswith(f"not an experiment; run it with: luffy compare {name}\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan", "smoke", "rl.stepz=3"], "rl.stepz: unknown key"),
        (["plan", "rl.steps=4", "smoke"], "CONFIG rl.steps=4"),
        (["plan"], "Missing argument 'CONFIG'. (luffy plan --help)"),
        (["show", "one", "--leaderboard"], "leave out one"),
        (["show", "--leaderboard", "--tag", "v2"], "leave out --tag"),
        (["evaluate", "--responses", "x.jsonl", "--request", "a=1"], "--request has no effect with --responses"),
        (["show", "--samples", "3"], "RUN: missing"),
        (["export", "one", "traces.parquet", "--step", "3"], "--step: is for a policy"),
        (["export", "one", "a", "--author", "r1"], "--author: chooses traces"),
        (["export", "one", "a.csv"], "a.csv: data are written as .parquet"),
        (["export", "workspace", "Makefile"], "Makefile: is a file"),
        (["export", "none", "out"], "no such run in workspace"),
        (["config", "rl.stepz", "--fields"], "rl.stepz"),
        (["run", "smoke", "--only", "none"], "--only none: .. prepare_data"),
        (["run", "smoke", "--only", "sft", "--dry-run"], "--only: prepare_data, which .. --only prepare_data, or"),
        (["prepare", "smoke"], "luffy run CONFIG --only prepare_data"),
        (["compare", "study_smoke", "--cells", ","], "--cells ','"),
        (["compare", "compare_arithmetic", "--page"], "--page has no effect on a comparison"),
        (["study", "study_smoke", "--plan"], "luffy study is gone .. luffy compare"),
        (["diff", "one", "other", "--show", "-1"], "'--show' .. greater than or equal to 0"),
        (["diff", "smoke-1", "it"], "smoke-1: is no finished evaluation"),
        (["rescore", "it", "--grader", "mathe"], "--grader mathe: .. choice, code, environment, exact, math"),
        (["rescore", "it", "--grader", "{kind: math, boxed: never}"], "no such grader"),
        (["rescore", "it", "--grader", "{"], "no such grader"),
        (["rescore", "it", "--grader", "math", "--suite", "arcc"], "--suite arcc: .. arc"),
        (["rescore", "it", "--grader", "choice", "--out", __file__], "cannot be made"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, luffy, arguments, named):
    stage = evaluation(tmp_path / "it", "BCB")
    said = luffy(*(str(stage) if each == "it" else each for each in arguments), code=2)
    assert said.startswith("error: ") and not [each for each in named.split(" .. ") if each not in said], said
    assert not (stage / "rescored").exists() and not Path("out").exists()


@pytest.mark.parametrize("command", ["run", "plan", "config", "show", "compare", "evaluate"])
def test_a_name_that_no_file_system_takes_is_one_line(luffy, command):
    assert "File name too long" in luffy(command, "a" * 300, code=2)


def test_a_full_disk_is_one_line_and_exit_code_2(luffy, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/smoke-1/run.json")

    monkeypatch.setattr(planning, "open_experiment", full)
    said = luffy("plan", "exp_configs/smoke.yaml", code=2)
    assert said.startswith("error: runs/smoke-1/run.json: no space left") and "luffy gc" in said


# Evaluations, graded again and compared.


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


def with_data(folder: Path, data: Path, named: dict[str, MathGrader], *, sweep: bool = False) -> None:
    """The three problems of an evaluation, or of a sweep's steps, and the order that its stage had."""
    (data / "suites").mkdir(parents=True)
    question = Message("user", "Which one?\nA. one\nB. two\nC. three")
    options = {"options": ["one", "two", "three"]}
    prompts = [Prompt(f"p{i}", "arc", (question,), "B", extra_info=options) for i in range(3)]
    write_prompts(data / "suites" / "arc.parquet", prompts)
    protocol = EvaluateSettings(
        seed=0, dtype="float32", evaluation=EvaluationConfig(max_response_tokens=8), grading=GradingConfig(named=named)
    )
    settings = SweepSettings(protocol=protocol, steps=(2,)) if sweep else protocol
    node, stage = ("sweep", "sweep") if sweep else ("evaluate_rl", "evaluate")
    inputs = {"data": str(data)}
    job = StageJob(
        node=node, stage=stage, key="k", settings=settings, inputs=inputs, upstream={}, execution=ExecutionConfig(),
        tracking=TrackingConfig(),
    )  # fmt: skip
    write_job(folder / "config.yaml", job)


def test_rescore_writes_a_summary_and_prints_what_changed(tmp_path, luffy):
    stage = evaluation(tmp_path / "it", "BCB")
    with_data(stage, tmp_path / "data", {})
    shown = luffy("rescore", str(stage), "--grader", "math").splitlines()
    scores = [word for word in shown[2].split() if not word.endswith((",", "]"))]
    assert scores == ["arc", "greedy", "66.7", "0.0", "+0", "-2"]
    assert "arc p0 0 B correct: B no_answer no box, or an empty one" in map(str.strip, shown)
    folder = stage / "rescored" / "math"
    assert read_results(folder / "results.json").rows[0].accuracy == 0
    assert [record.grader for record in read_sample_records(folder / "samples.jsonl.zst")] == ["math"] * 3
    assert (folder / "summary.md").is_file()
    assert read_results(stage / "results.json").rows[0].accuracy == pytest.approx(2 / 3)


LONGEST = "{kind: any, of: [" + ", ".join(["{kind: math, boxed: preferred}"] * 20) + "]}"


@pytest.mark.parametrize("grader", ["letters", "{kind: math, boxed: preferred}", "choice", LONGEST])
def test_rescore_takes_graders_by_the_evaluations_own_names_and_with_settings(tmp_path, luffy, grader):
    stage = evaluation(tmp_path / "it", "BCB")
    if grader != LONGEST:
        with_data(stage, tmp_path / "data", {"letters": MathGrader(boxed="preferred")})
    out = luffy("rescore", str(stage), "--grader", grader)
    assert ("graded without the questions" in out) == (grader == LONGEST)
    (folder,) = (stage / "rescored").iterdir()
    assert read_results(folder / "results.json").rows[0].accuracy == pytest.approx(2 / 3)


def test_rescore_leaves_multiple_choice_beside_other_suites_as_it_is(tmp_path, luffy):
    stage = evaluation(tmp_path / "it", "BCB")
    records = list(read_sample_records(stage / "samples.jsonl.zst"))
    boxed = [replace(r, suite="sums", grader="math", response="\\boxed{3}", ground_truth="3") for r in records]
    write_sample_records(stage / "samples.jsonl.zst", [*records, *boxed])
    rows = (result_row(records, 0.95), result_row(boxed, 0.95))
    write_results(stage / "results.json", EvaluationResults(checkpoint="rl", confidence=0.95, rows=rows))
    asked = ["rescore", str(stage), "--grader", "math_strict"]
    assert "arc: multiple choice, left as it is; --suite arc" in luffy(*asked, "--out", str(tmp_path / "all"))
    luffy(*asked, "--suite", "arc", "--out", str(tmp_path / "one"))
    graded = [{r.suite for r in read_sample_records(tmp_path / name / "samples.jsonl.zst")} for name in ("all", "one")]
    assert graded == [{"sums"}, {"arc"}]


def test_a_step_of_a_sweep_is_rescored_with_the_questions_of_its_stage(tmp_path, luffy):
    (tmp_path / "sweep").mkdir()
    step = evaluation(tmp_path / "sweep" / "step_000002", "BCB")
    with_data(tmp_path / "sweep", tmp_path / "data", {}, sweep=True)
    assert "graded without" not in luffy("rescore", str(step), "--grader", "choice")


def test_diff_has_the_comparison_at_its_head_and_both_answers_below_gains_first(tmp_path, luffy):
    first, second = evaluation(tmp_path / "a", "BBCA"), evaluation(tmp_path / "b", "BABA")
    shown = [line.strip() for line in luffy("diff", str(first), str(second)).splitlines()]
    assert shown[2].startswith("arc greedy 4 50.0 50.0 +0.0") and "1/2/1" in shown[2]
    assert [line for line in shown if re.match(r"p\d", line)] == ["p2 B 0/1 1/1 C B", "p1 B 1/1 0/1 B A"]
    out = luffy("diff", str(first), str(second), "--show", "1")
    assert "arc, greedy: 1 of 2 changed" in out and "p2" in out and "p1" not in out


@pytest.mark.parametrize("arguments", [["diff", "a", "b"], ["rescore", "a", "--grader", "math"]])
def test_confidential_problems_are_named_and_nothing_else_of_them_is_shown(tmp_path, luffy, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    for folder, answers in (("a", ["hush", SECRET]), ("b", [SECRET, "hush"])):
        evaluation(Path(folder), "BB", suite="gpqa_diamond", gold=SECRET)
        records = list(read_sample_records(Path(folder) / "samples.jsonl.zst"))
        told = [
            replace(record, answer=answer, correct=answer == "hush", reason=SECRET)
            for record, answer in zip(records, answers, strict=True)
        ]
        write_sample_records(Path(folder) / "samples.jsonl.zst", told)
    out = luffy(*arguments)
    assert "p0" in out and "(confidential)" in out
    assert SECRET not in out and "hush" not in out

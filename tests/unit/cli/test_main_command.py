import errno
import json
import re

import pytest
from synthetic.finished_stages import finish

from luffy.cli import main as command
from luffy.cli import planning
from luffy.config import load_experiment
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace


@pytest.fixture(autouse=True)
def surroundings(request, tmp_path, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("LUFFY_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    without_code = lambda *args, **kwargs: open_experiment(*args, **{**kwargs, "code": lambda rooms: {}})  # noqa: E731
    monkeypatch.setattr(planning, "open_experiment", without_code)


@pytest.mark.parametrize("options", [[], ["--verify"]])
def test_plan_prints_a_line_a_stage_and_overrides_may_stand_after_options(capsys, options):
    assert command.main(["plan", "exp_configs/smoke.yaml", *options, "chain=sft"]) == 0
    out = capsys.readouterr().out
    assert out.count("first run") == 6
    assert "evaluate_rl" not in out


def test_the_plan_of_a_tuned_comparison_has_its_tuning_runs_and_says_how_many_follow(capsys):
    assert command.main(["plan", "compare_tuned", "seeds=[11, 12]"]) == 0
    out = capsys.readouterr().out
    assert "18 runs for tuning, then 12 with the chosen values" in out
    stages = re.findall(r"(\w+) +[0-9a-f]{16} +run", out)
    # One SFT for both arms that go on with it and all of their tries.
    assert {name: stages.count(name) for name in ("base", "evaluate_base", "sft", "rl")} == {
        "base": 1, "evaluate_base": 1, "sft": 3 + 1, "rl": 15,
    }  # fmt: skip


def test_a_grid_is_planned_and_not_run_as_an_experiment(capsys):
    assert command.main(["plan", "grid_sft_size"]) == 0
    assert capsys.readouterr().out.count(" sft ") == 4 * 3
    around = ["compare", "smoke", "chain=sft", "method=sft", "--over", "sft.num_traces=[4, 8]", "--seed", "1"]
    assert command.main([*around, "--dry-run"]) == 0
    assert "smoke.grid 1 (sft.num_traces=8)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("grid_sft_size", "a grid of runs, not an experiment; run it with: luffy compare grid_sft_size"),
        ("compare_tuned", "a comparison of methods, not an experiment; run it with: luffy compare compare_tuned"),
        ("study_smoke", "a study, not an experiment; run it with: luffy study study_smoke"),
    ],
)
@pytest.mark.parametrize("task", ["run", "bench", "config"])
def test_a_file_of_many_runs_is_not_taken_for_an_experiment(capsys, task, name, says):
    assert command.main([task, name]) == 2
    assert capsys.readouterr().err == f"error: {name}: is {says}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "none.yaml"], "none.yaml: no such file"),
        (["plan", "smoke", "rl.stepz=3"], "rl.stepz: unknown key; did you mean 'steps'?"),
        (["plan", "smoke", "rl.steps=many"], "rl.steps: must be a whole number, found 'many'"),
        (["plan", "rl.steps=4", "smoke"], "the experiment comes first, then its overrides: CONFIG rl.steps=4"),
        (["plan"], "Missing argument 'CONFIG'. (luffy plan --help)"),
        (["show", "one", "--leaderboard"], "--leaderboard ranks the whole workspace: leave out one"),
        (["show", "--samples", "3"], "RUN: missing; luffy show lists the runs"),
        (["export", "one", "traces.parquet", "--step", "3"], "--step: is for a policy; traces.parquet gets data"),
        (["export", "one", "a", "--author", "r1"], "--author: chooses traces, and a does not end in .parquet or .csv"),
        (["config", "smoke", "--stage", "rl"], "--stage: chooses what --explain shows; give --explain, too"),
        (["run", "smoke", "--only", "none"], "--only none: this chain has no such stage; it has prepare_data"),
        (["prepare", "smoke"], "luffy prepare is gone; luffy run CONFIG --only prepare_data makes the data alone"),
        (["export", "one", "a.jsonl"], "a.jsonl: data are written as .parquet or .csv, and a policy to a folder"),
        (["export", "workspace", "Makefile"], "Makefile: is a file; give a folder that is not there yet"),
        (["study", "study_smoke", "--cells", ","], "--cells ',': names no cell; give one or more"),
        (["study", "study_smoke", "--reproduce", ""], "--reproduce '': names no cell; give one or more"),
        (["serve-engine", "./none"], "MODEL: ./none: no such folder; relative paths start at"),
        (["serve-engine", "some/model", "--host", "0.0.0.0"], "other machines can reach it; set OPENAI_API_KEY to"),
        (["serve-engine", "some/model", "--dtype", "float16"], "'float16' is not one of 'float32', 'bfloat16'"),
        (["watch", "--all"], "luffy watch is gone; Prefect's UI lists the runs, luffy show RUN their state"),
        (["diff", "one", "other", "--show", "-1"], "'--show': Input should be greater than or equal to 0"),
        (
            ["rescore", "one", "--grader", "math", "--show", "-1"],
            "'--show': Input should be greater than or equal to 0",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert command.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_full_disk_is_one_line_and_exit_code_2(capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/smoke-1/run.json")

    monkeypatch.setattr(planning, "open_experiment", full)
    assert command.main(["plan", "exp_configs/smoke.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error: runs/smoke-1/run.json: no space left; free space (luffy gc lists")


def test_show_without_a_run_lists_runs_and_results(capsys, tmp_path):
    (tmp_path / "runs" / "exp-1").mkdir(parents=True)
    (tmp_path / "runs" / "exp-1" / "run.json").write_text('{"state": "finished", "stages": {"base": {"key": "abc"}}}')
    (tmp_path / "stages" / "base" / "abc" / "checkpoints" / "step_000040").mkdir(parents=True)
    (tmp_path / "stages" / "base" / "abc" / "checkpoints" / "step_000040" / "COMPLETE").touch()
    assert command.main(["show"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    size = str((tmp_path / "runs" / "exp-1" / "run.json").stat().st_size)
    assert ["exp-1", "finished", "0s", size, "B", "base"] in lines
    assert ["base", "abc", "interrupted", "(step", "40)", "0s", "0", "B", "exp-1"] in lines


def test_show_lists_the_runs_with_a_tag_and_their_notes(capsys, tmp_path):
    for number, tags in enumerate((["paper", "v2"], ["paper"], [])):
        folder = tmp_path / "runs" / f"exp-{number}"
        folder.mkdir(parents=True)
        tracking = {"tags": tags, "note": "a longer warm-up"} if tags else {}
        (folder / "run.json").write_text(json.dumps({"state": "finished", "config": {"tracking": tracking}}))
    assert command.main(["show", "--tag", "paper", "--tag", "v2"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("exp-")]
    assert line.startswith("exp-0") and line.rstrip().endswith("#paper #v2 a longer warm-up")
    assert command.main(["show", "exp-0", "--tag", "paper"]) == 2


SEVEN_B = "exp_configs/luffy_qwen2.5_math_7b.yaml"
OWN_DATA = ["data.train={kind: file, path: data/samples/shop_train.jsonl}"] + [
    f"data.suites.{name}={{kind: file, path: data/samples/shop_test.jsonl}}"
    for name in load_experiment(SEVEN_B).data.suites
]


def test_a_ray_plan_says_first_what_each_gpu_would_hold(capsys):
    assert command.main(["plan", SEVEN_B, *OWN_DATA]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "shared GPU in an update (x 8), estimate in GiB" in lines
    assert "gradients 3.5 float32: 4 bytes per parameter / 8 ranks" in lines
    assert "total 41.2 of 79.0" in lines
    assert out.index("GPUs needed") < out.index("first run")


def test_what_all_arms_of_a_comparison_need_is_said_once(capsys):
    assert command.main(["plan", "compare_qwen2.5_math_7b"]) == 0
    out = capsys.readouterr().out
    assert out.count("GPU in SFT (x 8), estimate in GiB") == out.count("GPUs needed") == 1


def test_what_cannot_fit_is_shown_and_refused(capsys):
    assert command.main(["plan", SEVEN_B, *OWN_DATA, "execution.gradient_checkpointing=false"]) == 2
    captured = capsys.readouterr()
    assert re.search(r"total +\d+\.\d +of 79\.0: does not fit", captured.out)
    (complaint,) = captured.err.splitlines()
    assert "set execution.gradient_checkpointing: true" in complaint
    assert "first run" not in captured.out


def test_a_plan_shows_how_long_the_most_similar_finished_result_took(tmp_path, capsys):
    for overrides in (["rl.prompts_per_step=8", "rl.optimizer.lr=1e-4"], []):
        experiment = planning.open_experiment(load_experiment("smoke", overrides), Workspace(tmp_path))
        for name in ("prepare_data", "base", "sft"):
            finish(experiment, name)
        similar = finish(experiment, "rl")
    assert command.main(["plan", "smoke", "rl.optimizer.lr=1e-5"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^rl .* 1m00s .*lr ", out, re.MULTILINE)
    assert f"most similar finished result of this experiment (rl {similar.identity.key})" in " ".join(out.split())

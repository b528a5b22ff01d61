"""luffy from Python: names, mistakes, and what a run that was made by hand has to show."""

import json
import sys
from math import isclose
from types import SimpleNamespace

import pytest
from support.patience import ran
from support.refusals import refused
from synthetic.finished_stages import finish, run_of
from synthetic.result_rows import result_row, sample_record

import luffy
from luffy.api.runs import track_run
from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.evaluation.results import EvaluationResults, write_results
from luffy.evaluation.sample_files import SAMPLES_FILE, write_sample_records
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace

LARGE = "luffy_qwen2.5_math_7b"
RECORDS = [
    sample_record("arc", f"p{i}", prompt="what is it", response="so B", answer="B", ground_truth="B", correct=i < 3)
    for i in range(4)
]


@pytest.fixture
def made(tmp_path):
    """The run of a whole chain, and its workspace."""
    experiment = open_experiment(load_experiment("smoke"), Workspace(tmp_path), code=lambda *_: {"module": "1"})
    for node in experiment.nodes:
        lines = [{"step": step, "reward/mean": step / 4} for step in (1, 2)] if node.name in ("sft", "rl") else []
        directory = finish(experiment, node.name, metrics="".join(f"{json.dumps(line)}\n" for line in lines)).directory
        if node.name == "evaluate_rl":
            write_sample_records(directory / SAMPLES_FILE, RECORDS)
            rows = (result_row(RECORDS, 0.95),)
            write_results(directory / "results.json", EvaluationResults(checkpoint="rl", confidence=0.95, rows=rows))
    return run_of(experiment), tmp_path


def test_a_run_shows_what_its_files_hold(made):
    directory, workspace = made
    (run,) = luffy.load_runs(workspace)
    assert (run.directory, run.name, run.state) == (directory, "smoke-1", "finished")
    assert run.metrics["reward/mean"].to_dict() == {(stage, n): n / 4 for stage in ("sft", "rl") for n in (1, 2)}
    (row,) = run.accuracies.to_dict("records")
    assert (row["checkpoint"], row["suite"], row["accuracy"]) == ("rl", "arc", 0.75) and row["low"] < 0.75 < row["high"]
    (wrong,) = run.samples(stage="evaluate_rl", reward=(0, 0))
    assert wrong.response == "so B" and "p3" in wrong.heading
    assert run.report == directory / "report.html" and run.report.read_text() == "page"
    with refused("smoke-1: nix: no such stage", "prepare_data, base, sft", error=luffy.DataError):
        run.model("nix")


def test_a_run_that_has_made_nothing_is_empty(tmp_path):
    assert luffy.load_runs(tmp_path) == []
    (tmp_path / "runs" / "smoke-1").mkdir(parents=True)
    (tmp_path / "runs" / "smoke-1" / "run.json").write_text('{"state": "running"}')
    (run,) = luffy.load_runs(tmp_path)
    assert (run.state, run.metrics.empty, run.accuracies.empty, run.report) == ("killed", True, True, None)


def test_a_whole_run_is_shown_to_trackers_with_its_accuracies_and_reused_stages(made, monkeypatch):
    directory, _ = made
    record = json.loads((directory / "run.json").read_text())
    record["config"]["tracking"]["wandb"] = "offline"
    (directory / "run.json").write_text(json.dumps(record))
    shown = []

    class Recorder:
        def call(self, act):
            act(SimpleNamespace(log=lambda step, metrics: shown.append(metrics)))

        def close(self, *, failed):
            shown.append(failed)

    monkeypatch.setattr("luffy.tracking.services.open_services", lambda run, _: shown.append(run) or [Recorder()])
    track_run(directory, {"experiment": "smoke", "method": "luffy", "seed": "7", "run": "smoke-1"})
    run, metrics, failed = shown
    assert run.name == "smoke · luffy · run · seed 7" and run.report.endswith("/report.html") and not failed
    assert {action for action, _ in run.stages.values()} == {"reused"} and "- rl: reused, " in run.notes()
    assert metrics["accuracy/rl/arc/greedy"] == 0.75 and run.config["seed"] == 7


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        ("smoke", {"rl.stepz": 3}, ["smoke", "rl.stepz=3"]),
        ("smoke", {"rl": {"steps": 0}}, ["smoke", "rl.steps=0"]),
        ("smoke", {"method": "luff"}, ["smoke", "method=luff"]),
        ("smok", {}, ["smok"]),
        ("compare_arithmetic", {}, ["compare_arithmetic"]),
        # Found by the command, whose words become the exception's.
        ("own_data", {"data.train.path": "nix.jsonl"}, ["own_data", "data.train.path=nix.jsonl"]),
        (LARGE, {"execution.gpu_memory_gb": 24}, [LARGE, "execution.gpu_memory_gb=24"]),
    ],
)
def test_a_mistake_is_an_exception_with_the_line_of_the_command(tmp_path, capsys, config, fields, words):
    with pytest.raises(luffy.UserError) as raised:
        luffy.run(config, fields, workspace=tmp_path, quiet=True)
    assert main(["run", *words, "--workspace", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {raised.value}\n"
    assert luffy.load_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("config", "fields", "options", "named"),
    [
        ("smoke", {}, {"only": ["nix"]}, "--only nix: this chain has no such stage"),
        (load_experiment("smoke"), {}, {"force": ["nix"]}, "--force nix: this chain has no such stage"),
        ({"extends": "smoke"}, {"rl.stepz": 1}, {"seed": 3}, "stepz: unknown key"),
    ],
)
def test_options_reach_the_command(tmp_path, config, fields, options, named):
    with refused(named):
        luffy.run(config, fields, workspace=tmp_path, **options)


def test_names_are_there_and_nothing_heavy_is_loaded_for_them():
    code = "import luffy, sys; assert 'pydantic' not in sys.modules; before = set(sys.modules)\n"
    code += "assert {*luffy.__all__} <= {*dir(luffy)}; [getattr(luffy, name) for name in dir(luffy)]\n"
    code += "luffy.load_runs('nowhere'); sys.exit(str({'torch', 'prefect', 'pandas', 'transformers'} & {*sys.modules}))"
    done = ran([sys.executable, "-c", code])
    assert done.stderr.strip() == "set()"
    with pytest.raises(AttributeError, match="'luffy' has no attribute 'runn'"):
        luffy.runn  # noqa: B018


@pytest.mark.parametrize(
    ("response", "reference", "grader", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", "math", 1),
        ("it is 1/2", "0.5", "math", 0),
        (r"\boxed{5}", 5, "math", 1),
        ("it is 1/2", "0.5", {"kind": "math", "boxed": "preferred"}, 1),
        (r"\boxed{b}", "B", "choice", 1),
        ("four", "2", {"kind": "custom", "function": "mine_for_api:length"}, 0.4),
    ],
)
def test_a_response_is_graded_as_stages_grade_it(monkeypatch, tmp_path, response, reference, grader, reward):
    signature = "data_source, solution_str, ground_truth, extra_info=None"
    (tmp_path / "mine_for_api.py").write_text(f"def length({signature}):\n    return len(solution_str) / 10\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = luffy.grade(response, reference, grader)
    assert isclose(found.reward, reward) and bool(found.reason)


def test_an_unknown_grader_is_refused():
    with refused("math, math_strict, choice", error=luffy.ConfigError):
        luffy.grade("1", "1", "maths")

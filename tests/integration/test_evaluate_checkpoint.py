"""flows/evaluate_checkpoint.py on the real chain of smoke.yaml: one model, a sweep, mistakes; and the leaderboard.

`tests/unit/stages/test_sweep.py` has a sweep that is killed.
"""

import json
import re
import shutil
from pathlib import Path

import flow_process
import pytest
from flow_process import stage_states as states

from luffy.cli.main import main
from luffy.evaluation.results import read_results
from luffy.pipeline.events import EventReader

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMOKE = "exp_configs/smoke.yaml"
KEEP = "execution.checkpoint.keep=3"


def run(workspace, *arguments):
    return flow_process.run(workspace, SMOKE, *arguments, flow="evaluate_checkpoint")


@pytest.fixture
def finished(undisturbed):
    """A workspace after the whole chain, with the checkpoints of steps 2, 4 and 6. Not to be changed."""
    return undisturbed[0]


@pytest.fixture
def workspace(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "workspace", symlinks=True)


@pytest.fixture(scope="module")
def sweep_of_all(undisturbed, tmp_path_factory):
    """A workspace after a sweep over all kept checkpoints as well, and that sweep."""
    workspace = shutil.copytree(undisturbed[0], tmp_path_factory.mktemp("swept") / "workspace", symlinks=True)
    return workspace, run(workspace, "--steps", "6,2,4", KEEP)


def stage(workspace, node, run_name="smoke-1"):
    return (workspace / "runs" / run_name / "stages" / node).resolve()


def test_a_standalone_evaluation_equals_that_of_the_chain_and_is_reused(workspace):
    model = stage(workspace, "rl")
    result = run(workspace, "--model", str(model))
    assert result.returncode == 0, result.stderr
    assert set(states(result)) == {"prepare_data", "base", "evaluate_base", "report"}
    assert result.stdout.splitlines()[-1] == f"report: {workspace}/runs/smoke-2/report.html"
    alone = read_results(stage(workspace, "evaluate_base", "smoke-2") / "results.json")
    assert alone.rows == read_results(stage(workspace, "evaluate_rl") / "results.json").rows
    again = run(workspace, "--model", str(model / "model"))
    assert set(states(again).values()) == {"reused"}


def test_a_model_and_a_file_suffice_and_results_call_the_model_by_its_name(workspace, tmp_path):
    model = shutil.copytree(stage(workspace, "rl") / "model", tmp_path / "Mine")
    (tmp_path / "sums.jsonl").write_text(
        '{"prompt": "12+34", "answer": "46"}\n' * 2 + '{"prompt": "1+1", "answer": "2"}\n'
    )
    arguments = ("--model", model, "--suite", tmp_path / "sums.jsonl", "seed=3")
    result = flow_process.run(workspace, *arguments, flow="evaluate_checkpoint")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^suite +decoding +Mine *\nsums +greedy +\d", result.stdout, re.MULTILINE)
    (rows,) = (read_results(stage(workspace, "evaluate_base", "mine-1") / "results.json").rows,)
    assert [(row.suite, row.num_problems, row.protocol.max_response_tokens) for row in rows] == [("sums", 2, 64)]
    report = (workspace / "runs" / "mine-1" / "report.html").read_text()
    assert re.findall(r'class="label">(.*?)<', report) == ["Mine"]


def test_a_sweep_evaluates_each_kept_step_by_one_engine_and_its_last_is_the_final_model(sweep_of_all):
    workspace, result = sweep_of_all
    assert result.returncode == 0, result.stderr
    kept = {"prepare_data": "reused", "base": "reused", "sft": "reused", "rl": "reused"}
    assert states(result) == {**kept, "sweep": "finished"}
    sweep = stage(workspace, "sweep", "smoke-2")
    assert (sweep / "log.txt").read_text().count("loaded the weights of step") == 3
    results = {step: read_results(sweep / f"step_{step:06d}" / "results.json") for step in (2, 4, 6)}
    assert results[6].rows == read_results(stage(workspace, "evaluate_rl") / "results.json").rows
    assert len({(sweep / f"step_{step:06d}" / "samples.jsonl.zst").read_bytes() for step in (2, 4, 6)}) == 3
    last = [event for event in EventReader(sweep / "events.jsonl").read() if event.kind == "progress"][-1]
    assert (last.step, last.total) == (3 * 96, 3 * 96)
    page = (workspace / "runs" / "smoke-2" / "curve.html").read_text()
    assert page.count("<figure>") == 8 and "step 2 → 6" in page


def test_the_leaderboard_has_one_row_per_model_from_any_kind_of_evaluation(sweep_of_all, capsys):
    """The sweep and the chain have both evaluated the model of step 6."""
    swept, _ = sweep_of_all
    assert main(["show", "--leaderboard", "--workspace", str(swept)]) == 0
    tables = json.loads((swept / "leaderboard.json").read_text())["tables"]
    assert [len(table["columns"]) for table in tables] == [4, 4]
    for table in tables:
        found = {(row["checkpoint"], row["method"]) for row in table["rows"]}
        assert len(table["rows"]) == 5
        assert found == {("base", ""), ("SFT", ""), *((f"RL step {step}", "luffy") for step in (2, 4, 6))}
        assert all(cell is not None for row in table["rows"] for cell in row["cells"])
    assert "RL step 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --model"),
        (["--steps", "2,3", KEEP], "has no checkpoint of 3; there are: 2, 4, 6"),
        (["--steps", "2", "seed=5"], "--steps: the RL run of smoke is not finished in"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(finished, arguments, message, capsys):
    before = sorted(path.name for path in (finished / "runs").iterdir())
    assert main(["evaluate", SMOKE, *arguments, "--workspace", str(finished)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in (finished / "runs").iterdir()) == before

"""`luffy evaluate` on the real chain of smoke.yaml: one model, a sweep, mistakes; and a notebook.

`tests/unit/stages/test_evaluate.py` has a sweep that is killed.
"""

import os
import re
import shutil
from pathlib import Path

import flow_process
import pytest
from flow_process import UNDISTURBED
from flow_process import stage_states as states
from support.patience import PATIENCE_S
from support.prefect_api import shared_api

import luffy
from luffy.cli.main import main
from luffy.evaluation.results import read_results
from luffy.pipeline.events import EventReader

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMOKE = "exp_configs/smoke.yaml"
KEEP = "execution.checkpoint.keep=3"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def run(workspace, *arguments):
    """Its stages in one process."""
    return flow_process.run(workspace, "evaluate", *arguments, flow=flow_process.IN_PROCESS)


@pytest.fixture
def workspace(undisturbed, tmp_path):
    """After the whole chain, with the checkpoints of steps 2, 4 and 6."""
    return shutil.copytree(undisturbed[0], tmp_path / "workspace", symlinks=True)


def stage(workspace, node, run_name="smoke-1"):
    return (workspace / "runs" / run_name / "stages" / node).resolve()


def test_a_standalone_evaluation_equals_that_of_the_chain_and_is_reused(workspace):
    model = stage(workspace, "rl")
    result = run(workspace, SMOKE, "--model", str(model))
    assert result.returncode == 0, result.stderr
    assert set(states(result)) == {"prepare_data", "base", "evaluate_base", "report"}
    assert result.stdout.splitlines()[-1] == f"report: {workspace}/runs/smoke-2/report.html"
    alone = read_results(stage(workspace, "evaluate_base", "smoke-2") / "results.json")
    assert alone.rows == read_results(stage(workspace, "evaluate_rl") / "results.json").rows
    again = run(workspace, SMOKE, "--model", str(model / "model"))
    assert set(states(again).values()) == {"reused"}


def test_a_model_and_a_file_suffice_and_results_call_the_model_by_its_name(workspace, tmp_path):
    model = shutil.copytree(stage(workspace, "rl") / "model", tmp_path / "Mine")
    (tmp_path / "sums.jsonl").write_text(
        '{"prompt": "12+34", "answer": "46"}\n' * 2 + '{"prompt": "1+1", "answer": "2"}\n'
    )
    result = run(workspace, "--model", model, "--suite", tmp_path / "sums.jsonl", "seed=3")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^suite +decoding +Mine *\nsums +greedy +\d", result.stdout, re.MULTILINE)
    rows = read_results(stage(workspace, "evaluate_base", "mine-1") / "results.json").rows
    assert [(row.suite, row.num_problems, row.protocol.max_response_tokens) for row in rows] == [("sums", 2, 64)]
    report = (workspace / "runs" / "mine-1" / "report.html").read_text()
    assert re.findall(r'class="label">(.*?)<', report) == ["Mine"]


def test_a_sweep_evaluates_each_kept_step_by_one_engine_and_its_last_is_the_final_model(workspace):
    result = flow_process.run(workspace, SMOKE, "--steps", "6,2,4", KEEP, flow="evaluate_checkpoint")
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one of --model"),
        (["--steps", "2,3", KEEP], "has no checkpoint of 3; there are: 2, 4, 6"),
        (["--steps", "2", "seed=5"], "--steps: the RL run of smoke is not finished in"),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(undisturbed, arguments, message, capsys):
    assert main(["evaluate", SMOKE, *arguments, "--workspace", str(undisturbed[0])]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert [path.name for path in (undisturbed[0] / "runs").iterdir()] == ["smoke-1"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_of_the_docs_runs_to_its_end_and_reuses_what_the_command_has_made(workspace, file, monkeypatch):
    """In a real kernel, whose event loop runs, with an experiment that takes seconds and that is finished already."""
    monkeypatch.setenv("PREFECT_API_URL", shared_api()["PREFECT_API_URL"])
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    monkeypatch.setenv("LUFFY_WORKSPACE", str(workspace))
    notebook = nbformat.read(file, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert 'experiment, fields = "' in first.source
    first.source += f"\nexperiment, fields = {UNDISTURBED[0]!r}, {{'execution.checkpoint.keep': 3}}"
    nbclient.NotebookClient(notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(ROOT)}}).execute()
    (first,) = (run for run in luffy.load_runs(workspace) if run.name == "smoke-2")
    assert {stage.action for stage in first.record.stages.values()} == {"reused"}
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert [output for output in shown if output.output_type == "error"] == []
    kept = [output for cell in nbformat.read(file, as_version=4).cells for output in cell.get("outputs", ())]
    assert [output.output_type for output in kept] == [output.output_type for output in shown]
    assert file.stat().st_size < 100_000 and os.fspath(Path.home()) not in file.read_text()

"""Runs from Python: read, from a script without a guard, interrupted; and in the notebooks of docs/."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from flow_process import UNDISTURBED
from safetensors.torch import load_file
from support.patience import PATIENCE_S, wait_until
from support.prefect_api import shared_api
from support.sandboxed import processes_below

import luffy
from luffy.cli import main as command
from luffy.config import load_experiment
from luffy.pipeline.graph import nodes_providing
from luffy.pipeline.records import read_run

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_a_run_of_the_command_is_read_from_python(undisturbed):
    (run,) = luffy.load_runs(undisturbed[0])
    assert (run.name, run.state) == ("smoke-1", "finished")
    assert run.metrics.loc["rl"].index.tolist() == [1, 2, 3, 4, 5, 6]
    assert {"base", "sft", "rl"} == {*run.accuracies.checkpoint} and run.report.is_file() and run.samples(3)
    model, tokenizer = run.model()
    stored = load_file(run.record.stages["rl"].directory / "model" / "model.safetensors")
    assert all(stored[name].equal(weight) for name, weight in model.state_dict().items() if name in stored)
    earlier, _ = run.model(step=2)
    assert not earlier.get_input_embeddings().weight.equal(model.get_input_embeddings().weight)
    assert tokenizer.decode(tokenizer("1 +1")["input_ids"]).endswith("1 +1")


def test_nothing_that_is_read_or_exported_has_text_of_confidential_problems(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "held_out")}
    for name, file in files.items():
        rows = [(f"canary-{name} {n}+1 =", str(n + 1), f"canary-trace \\boxed{{{n + 1}}}") for n in range(8)]
        file.write_text(
            "\n".join(json.dumps(dict(zip(("problem", "answer", "target"), row, strict=True))) for row in rows)
        )
    train, held_out = ({"kind": "file", "path": os.fspath(file), "confidential": True} for file in files.values())
    smoke = load_experiment(ROOT / "exp_configs/smoke.yaml").model_dump(mode="json")
    smoke["data"] |= {
        "train": train,
        "suites": {"held_out": held_out, "retention": smoke["data"]["suites"]["retention"]},
    }
    workspace = tmp_path / "workspace"
    monkeypatch.setenv("PREFECT_API_URL", shared_api()["PREFECT_API_URL"])
    run = luffy.run(smoke | {"rl": smoke["rl"] | {"steps": 2}}, workspace=workspace)
    for stage in nodes_providing("evaluation", run.record.stages):
        assert {sample.heading.partition(",")[0] for sample in run.samples(100, stage=stage)} == {"retention"}
    frames = (run.metrics, run.accuracies, luffy.load_results(workspace), luffy.load_problem_results(workspace))
    read = [repr((run, run.record, run.samples(100))), *(frame._repr_html_() + frame.to_csv() for frame in frames)]
    read += [file.read_text() for file in run.directory.glob("report.*")]
    where = ["--workspace", os.fspath(workspace)]
    assert command.main(["export", run.name, os.fspath(tmp_path / "exported"), *where]) == 0
    for target in ("traces.parquet", "data.csv"):
        assert command.main(["export", run.name, os.fspath(tmp_path / target), *where]) == 2  # nothing may leave
    assert command.main(["show", run.name, "--samples", "50", *where]) == 0
    read += [
        *capsys.readouterr(),
        *(file.read_bytes().decode(errors="replace") for file in (tmp_path / "exported").iterdir()),
    ]
    assert not [text for text in read if "canary" in text]


def test_an_interrupted_run_ends_with_its_processes_and_continues(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import luffy\nluffy.run('smoke', workspace={str(tmp_path / 'workspace')!r})\n")
    process = subprocess.Popen(
        [sys.executable, script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_until(lambda: [*(tmp_path / "workspace").glob("stages/base/*/checkpoints/step_*/COMPLETE")], "a checkpoint")
    below = processes_below(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert said.endswith("KeyboardInterrupt: interrupted; the same command resumes\n")
    wait_until(lambda: not any(each.is_running() for each in below), "the end of the run's processes")
    (record,) = [read_run(directory) for directory in (tmp_path / "workspace" / "runs").iterdir()]
    assert record.condition == "interrupted"


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_of_the_docs_runs_to_its_end_and_reuses_what_the_command_has_made(
    undisturbed, tmp_path, file, monkeypatch
):
    """In a real kernel, whose event loop runs, with an experiment that takes seconds and that is finished already."""
    workspace = Path(shutil.copytree(undisturbed[0], tmp_path / "workspace", symlinks=True))
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

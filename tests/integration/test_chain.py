"""The chain of exp_configs/smoke.yaml through the real flow: what it leaves, a kill, reuse, and what starts nothing.

One undisturbed run makes a workspace; a test that changes something changes a copy of it. `test_chain_struck` has the
other kills, interrupts and surroundings.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import flow_process
import pytest
from campaigns.random_kills import processes_of, promised_of
from flow_process import UNDISTURBED
from flow_process import stage_states as states
from safetensors.torch import load_file
from support.holding import Hold
from support.patience import PATIENCE_S, ran, wait_until
from support.stages import WEIGHTS, execute, opened

import luffy
from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.graph import providing
from luffy.pipeline.lock import holder_of
from luffy.pipeline.workspace import Workspace
from luffy.tracking.metrics import read_metrics

ROOT = Path(__file__).parents[2]
HEAVY = "torch|transformers|tokenizers|deepspeed|vllm|ray|matplotlib|sympy|math_verify"
NODES = ["prepare_data", "base", "sft", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl", "report"]


def run(workspace, *arguments, **environment):
    return flow_process.run(workspace, *arguments, flow="full_pipeline", **environment)


def only(*nodes):
    return {name: "finished" if name in nodes else "reused" for name in NODES}


def stage(workspace, node):
    """The directory that the newest run used for `node`."""
    newest = max((workspace / "runs").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    return (newest / "stages" / node).resolve()


@pytest.fixture(scope="module")
def finished(undisturbed):
    """A workspace after one undisturbed run with an embedded server."""
    workspace, result = undisturbed
    assert states(result) == only(*NODES)
    first, *_, last = result.stdout.splitlines()
    assert first.startswith(f"workspace {workspace}: "), "while Prefect starts"
    report = Path(last.removeprefix("report: "))
    assert report.name == "report.html" and report.is_file()
    return workspace


@pytest.fixture
def workspace(finished, tmp_path):
    copy = tmp_path / "workspace"
    shutil.copytree(finished, copy, symlinks=True, ignore=shutil.ignore_patterns("warm_server.log"))
    return copy


def test_rl_after_kill_9_equals_the_undisturbed_run_bit_for_bit(workspace, tmp_path):
    directory = stage(workspace, "rl")
    undisturbed = promised_of(directory)
    shutil.rmtree(directory)
    hold = Hold(tmp_path, "rl", 5)
    flow = flow_process.start(workspace, *UNDISTURBED, flow="full_pipeline", **hold.environment)
    hold.wait(flow)
    os.kill(int(re.search(r"pid (\d+)", holder_of(directory))[1]), 9)
    flow.communicate(timeout=PATIENCE_S)
    wait_until(lambda: processes_of(workspace) == [])
    assert not (directory / "manifest.json").exists()
    result = run(workspace, *UNDISTURBED)
    assert re.search(r"rl: resume from step \d", result.stdout)
    found = states(result)
    assert found.pop("report")  # shows times, too, which differ
    assert found.items() <= only("rl").items()
    assert promised_of(directory) == undisturbed


def test_a_run_that_has_nothing_to_make_starts_nothing_heavy_and_then_can_be_given_up(workspace, capsys):
    asked = ["gc", "--delete", "--workspace", str(workspace)]
    assert main(asked) == 0
    assert "nothing can be deleted" in capsys.readouterr().out
    result = run(workspace, *UNDISTURBED, PYTHONPROFILEIMPORTTIME="1")
    assert states(result) == only()
    assert "Accuracy in %" in result.stdout
    assert re.search(r"\| +prefect$", result.stderr, re.MULTILINE)
    assert not re.search(rf"\| +({HEAVY})$", result.stderr, re.MULTILINE)
    assert not (workspace / "warm_server.log").exists()
    assert main([*asked, "--keep-runs", "0"]) == 0
    assert not any((workspace / "runs").iterdir()) and not list((workspace / "stages").glob("*/*"))


DRY = {
    "a plan": (
        [*UNDISTURBED, "sft.epochs=3", "--dry-run"], 0,
        [r"base +\w{16} +reused *", r"sft +\w{16} +run +\d+s +sft.epochs 2 -> 3 \(against \w{16}\)"],
    ),
    "what the GPUs cannot hold": (
        ["exp_configs/luffy_qwen2.5_math_7b.yaml", "execution.gpu_memory_gb=24"], 2,
        ["error: execution.vllm: an engine needs about .* GiB of .*; (raise|lower) .*"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRY)
def test_decisions_and_refusals_start_nothing_and_load_nothing_heavy(name, finished):
    arguments, code, lines = DRY[name]
    before = sorted(finished.rglob("*"))
    command = [sys.executable, "-X", "importtime", "flows/full_pipeline.py", *arguments]
    result = ran(command, cwd=ROOT, env={**os.environ, "LUFFY_WORKSPACE": str(finished), "COLUMNS": "160"})
    assert result.returncode == code
    for line in lines:
        assert re.search(f"^{line}", result.stderr if code else result.stdout, re.MULTILINE)
    assert not re.search(r"\| +(prefect|torch)$", result.stderr, re.MULTILINE)
    assert sorted(finished.rglob("*")) == before


def test_a_checkpoint_is_exported_as_a_model_folder(workspace, tmp_path, capsys):
    """From the checkpoint's own files, with no engine; that of the last step is the final model, bit for bit."""
    rl = stage(workspace, "rl")
    last = max(int(path.name.removeprefix("step_")) for path in (rl / "checkpoints").iterdir())
    for folder, options in ((tmp_path / "final", []), (tmp_path / "last", ["--step", str(last)])):
        assert main(["export", str(rl), str(folder), *options]) == 0
        assert {path.name for path in (rl / "model").iterdir()} <= {path.name for path in folder.iterdir()}
        assert (folder / "model.safetensors").read_bytes() == (rl / WEIGHTS).read_bytes()
    weights = (rl / WEIGHTS).read_bytes()
    (rl / "manifest.json").unlink()  # as of a run that was stopped while it wrote its model
    (rl / WEIGHTS).unlink()
    assert main(["export", str(rl), str(tmp_path / "newest")]) == 0
    assert (tmp_path / "newest" / "model.safetensors").read_bytes() == weights
    for target, options, said in (("none", ["--step", "1"], "no checkpoint of step 1"), ("last", [], "is not empty")):
        assert main(["export", str(rl), str(tmp_path / target), *options]) == 2
        assert said in capsys.readouterr().err


def test_a_run_is_read_from_python_and_exported_with_a_card_and_the_experiment_that_makes_it_again(finished, tmp_path):
    (run,) = luffy.load_runs(finished)
    assert (run.name, run.state) == ("smoke-1", "finished")
    assert run.metrics.loc["rl"].index.tolist() == [1, 2, 3, 4, 5, 6]
    assert {"base", "sft", "rl"} == {*run.accuracies.checkpoint} and run.report.is_file() and run.samples(3)
    model, tokenizer = run.model()
    stored = load_file(stage(finished, "rl") / WEIGHTS)
    assert all(stored[name].equal(weight) for name, weight in model.state_dict().items() if name in stored)
    earlier, _ = run.model(step=2)
    assert not earlier.get_input_embeddings().weight.equal(model.get_input_embeddings().weight)
    assert tokenizer.decode(tokenizer("1 +1")["input_ids"]).endswith("1 +1")

    folder = tmp_path / "policy"
    assert main(["export", "smoke", str(folder), "--workspace", str(finished)]) == 0
    assert (folder / "model.safetensors").read_bytes() == (stage(finished, "rl") / WEIGHTS).read_bytes()
    card = (folder / "README.md").read_text()
    assert "after the stage rl of smoke" in card and "| in_distribution, greedy 8 problems |" in card
    plans = open_experiment(load_experiment(folder / "experiment.yaml"), Workspace(finished)).plan()
    assert {plan.action for plan in plans} == {"reuse"}


def test_the_report_says_where_a_step_of_each_stage_went(finished):
    text = (stage(finished, "report") / "report.html").read_text()
    table = text[text.index(">part of a step<") :].partition("</table>")[0]
    stages = re.findall(r'<th scope="col">(\w+)</th>', table)
    rows = [re.findall(r'class="value">(.*?)</span>', row) for row in table.split("<tr>")[1:]]
    assert stages == ["base", "sft", "rl"]
    for place, node in enumerate(stages, start=1):
        logged = [row["perf/step_s"] for row in read_metrics(stage(finished, node) / "metrics.jsonl")]
        shown = {row[0]: float(row[place].split()[0].replace("–", "0").replace(",", "")) for row in rows}
        parts = [shown[row[0]] for row in rows[: [row[0] for row in rows].index("a step")]]
        assert sum(parts) == pytest.approx(shown["a step"], abs=0.04)
        assert shown["a step"] == pytest.approx(sum(logged) / len(logged), abs=0.01)
        assert shown["tokens a second"] > 0 and shown["start, once"] > 0


def test_nothing_that_is_read_or_exported_has_text_of_confidential_problems(tmp_path, capsys):
    sources = {}
    for name in ("train", "held_out"):
        file = tmp_path / f"{name}.jsonl"
        rows = [(f"canary-{name} {n}+1 =", str(n + 1), f"canary-trace \\boxed{{{n + 1}}}") for n in range(8)]
        fields = [dict(zip(("problem", "answer", "target"), row, strict=True)) for row in rows]
        file.write_text("\n".join(map(json.dumps, fields)))
        sources[name] = f"{{kind: file, path: {file}, confidential: true}}"
    suites = f"data.suites={{held_out: {sources['held_out']}, other_mix: null, in_distribution: null, longer: null}}"
    workspace = tmp_path / "workspace"
    execute(opened(workspace, "smoke.yaml", f"data.train={sources['train']}", suites, "rl.steps=2"))
    (run,) = luffy.load_runs(workspace)
    for node in providing("evaluation", run.record.kinds):
        assert {sample.heading.partition(",")[0] for sample in run.samples(100, stage=node)} == {"retention"}
    frames = (run.metrics, run.accuracies, luffy.load_results(workspace), luffy.load_problem_results(workspace))
    read = [repr((run, run.record, run.samples(100))), *(frame._repr_html_() + frame.to_csv() for frame in frames)]
    read += [file.read_text() for file in run.directory.glob("report.*")]
    where = ["--workspace", os.fspath(workspace)]
    assert main(["export", run.name, os.fspath(tmp_path / "exported"), *where]) == 0
    assert main(["export", run.name, os.fspath(tmp_path / "traces.parquet"), *where]) == 2  # nothing may leave
    assert main(["show", run.name, "--samples", "50", *where]) == 0
    read += [
        *capsys.readouterr(),
        *(file.read_bytes().decode(errors="replace") for file in (tmp_path / "exported").iterdir()),
    ]
    assert not [text for text in read if "canary" in text]

"""The real chain of exp_configs/smoke.yaml through the real flow: reuse, kills, interrupts, mistakes.

One undisturbed run makes a workspace; every other test changes a copy of it.
"""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import flow_process
import psutil
import pytest
from campaigns.random_kills import processes_of, promised_of
from flow_process import UNDISTURBED
from flow_process import stage_states as states
from support.holding import Hold
from support.patience import PATIENCE_S, ran, wait_until

from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.lock import holder_of
from luffy.pipeline.workspace import Workspace
from luffy.tracking.metrics import read_metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMOKE = "exp_configs/smoke.yaml"
HEAVY = "torch|transformers|tokenizers|deepspeed|vllm|ray|matplotlib|sympy|math_verify"
NODES = ["prepare_data", "base", "sft", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl", "report"]


def start(workspace, *arguments, **environment):
    return flow_process.start(workspace, *(arguments or (SMOKE,)), flow="full_pipeline", **environment)


def run(workspace, *arguments, **environment):
    return flow_process.run(workspace, *(arguments or (SMOKE,)), flow="full_pipeline", **environment)


def only(*nodes):
    return {name: "finished" if name in nodes else "reused" for name in NODES}


def stage(workspace, node):
    """The directory that the newest run used for `node`."""
    newest = max((workspace / "runs").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    return (newest / "stages" / node).resolve()


def program_of(directory):
    """The process that works in `directory`."""
    return psutil.Process(int(re.search(r"pid (\d+)", holder_of(directory))[1]))


@pytest.fixture(scope="module")
def finished(undisturbed):
    """A workspace after one undisturbed run with an embedded server."""
    workspace, result = undisturbed
    assert states(result) == only(*NODES)
    report = Path(result.stdout.splitlines()[-1].removeprefix("report: "))
    assert report.name == "report.html"
    assert report.is_file()
    return workspace


@pytest.fixture
def workspace(finished, tmp_path):
    copy = tmp_path / "workspace"
    shutil.copytree(finished, copy, symlinks=True, ignore=shutil.ignore_patterns("warm_server.log"))
    return copy


def test_a_checkpoint_is_exported_as_a_model_folder(workspace, tmp_path, capsys):
    """From the checkpoint's own files, with no engine; that of the last step is the final model, bit for bit."""
    rl = stage(workspace, "rl")
    last = max(int(path.name.removeprefix("step_")) for path in (rl / "checkpoints").iterdir())
    for folder, options in ((tmp_path / "final", []), (tmp_path / "last", ["--step", str(last)])):
        assert main(["export", str(rl), str(folder), *options]) == 0
        assert {path.name for path in (rl / "model").iterdir()} <= {path.name for path in folder.iterdir()}
        assert (folder / "model.safetensors").read_bytes() == (rl / "model" / "model.safetensors").read_bytes()
    (rl / "manifest.json").unlink()  # as of a run that was stopped while it wrote its model
    (rl / "model" / "model.safetensors").unlink()
    assert main(["export", str(rl), str(tmp_path / "newest")]) == 0
    assert (tmp_path / "newest" / "model.safetensors").read_bytes() == (
        tmp_path / "last" / "model.safetensors"
    ).read_bytes()
    assert main(["export", str(rl), str(tmp_path / "none"), "--step", "1"]) == 2
    assert main(["export", str(rl), str(tmp_path / "last")]) == 2
    assert main(["export", str(workspace), str(tmp_path / "none")]) == 2
    mistakes = capsys.readouterr().err
    assert "no checkpoint of step 1; there are: " in mistakes
    assert "is not empty" in mistakes and "no such run in workspace" in mistakes


def test_a_run_is_exported_with_a_card_and_the_experiment_that_makes_it_again(workspace, tmp_path):
    folder = tmp_path / "policy"
    assert main(["export", "smoke", str(folder), "--workspace", str(workspace)]) == 0
    assert (folder / "model.safetensors").read_bytes() == (
        stage(workspace, "rl") / "model/model.safetensors"
    ).read_bytes()
    card = (folder / "README.md").read_text()
    assert "after the stage rl of smoke" in card and "| in_distribution, greedy 8 problems |" in card
    plans = open_experiment(load_experiment(folder / "experiment.yaml"), Workspace(workspace)).plan()
    assert {plan.action for plan in plans} == {"reuse"}


def test_the_report_says_where_a_step_of_each_stage_went(workspace):
    text = (stage(workspace, "report") / "report.md").read_text()
    lines = text[text.index("| part of a step |") :].split("\n\n")[0].splitlines()
    (_, *stages), _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert stages == ["base", "sft", "rl"]
    for place, node in enumerate(stages, start=1):
        logged = [row["perf/step_s"] for row in read_metrics(stage(workspace, node) / "metrics.jsonl")]
        shown = {row[0]: float(row[place].split()[0].replace("–", "0").replace(",", "")) for row in rows}
        parts = [shown[row[0]] for row in rows[: [row[0] for row in rows].index("a step")]]
        assert sum(parts) == pytest.approx(shown["a step"], abs=0.04)
        assert shown["a step"] == pytest.approx(sum(logged) / len(logged), abs=0.01)
        assert shown["tokens a second"] > 0 and shown["start, once"] > 0


def test_a_run_is_shown_from_the_raw_data_to_samples(workspace, capsys, monkeypatch):
    monkeypatch.setenv("LUFFY_WORKSPACE", str(workspace))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", "smoke"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"prepare_data data\.train arithmetic: settings [0-9a-f]{16}", out)
    assert f"model base {stage(workspace, 'base').name}" in out
    assert "rl step 6" in out and "reward/mean" in out and "Accuracy in %" in out
    assert main(["show", "smoke", "--samples", "3", "--reward", "..0.5"]) == 0
    out = capsys.readouterr().out
    assert out.count("rollout, reward 0 (") == 3 and "response:" in out and "<|bos|>" in out


def test_nothing_of_a_run_can_go_until_it_is_given_up(workspace, capsys):
    asked = ["gc", "--delete", "--only", "run", "--only", "result", "--workspace", str(workspace)]
    assert main(asked) == 0
    assert "nothing can be deleted" in capsys.readouterr().out
    assert main(["gc", "--delete", "--workspace", str(workspace)]) == 0  # older checkpoints of finished stages
    capsys.readouterr()
    assert states(run(workspace, *UNDISTURBED, "--workspace", str(workspace))) == only()
    assert main([*asked, "--keep-runs", "0"]) == 0
    assert not any((workspace / "runs").iterdir()) and not list((workspace / "stages").glob("*/*"))


def test_a_dry_run_shows_decisions_with_reasons_and_starts_nothing(workspace):
    before = sorted(path.name for path in (workspace / "runs").iterdir())
    command = [sys.executable, "-X", "importtime", "flows/full_pipeline.py", SMOKE, "sft.epochs=3", "--dry-run"]
    env = {**os.environ, "LUFFY_WORKSPACE": str(workspace), "COLUMNS": "160"}
    result = ran(command, cwd=ROOT, env=env)
    assert re.search(r"^base +\w{16} +reused *$", result.stdout, re.MULTILINE)
    assert re.search(r"^sft +\w{16} +run +\d+s +sft.epochs 2 -> 3 \(against \w{16}\)", result.stdout, re.MULTILINE)
    assert not re.search(r"\| +(prefect|torch)$", result.stderr, re.MULTILINE)
    assert sorted(path.name for path in (workspace / "runs").iterdir()) == before
    assert not (workspace / "warm_server.log").exists()


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_a_run_that_its_gpus_cannot_hold_is_refused_before_anything_starts(tmp_path, options):
    config = ["exp_configs/luffy_qwen2.5_math_7b.yaml", "execution.gpu_memory_gb=24"]
    command = [sys.executable, "-X", "importtime", "flows/full_pipeline.py", *config, *options]
    result = ran(command, cwd=ROOT, env={**os.environ, "LUFFY_WORKSPACE": str(tmp_path / "workspace")})
    said = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert result.returncode == 2
    assert said[0].startswith("error: execution.vllm: an engine needs about ")
    assert all("GiB of" in line for line in said)
    assert all("; raise " in line or "; lower " in line for line in said)
    assert ("does not fit" in result.stdout) == bool(options)
    assert not re.search(r"\| +(prefect|torch)$", result.stderr, re.MULTILINE)
    assert not (tmp_path / "workspace").exists()


def test_rl_after_kill_9_equals_an_undisturbed_run_bit_for_bit(workspace, tmp_path):
    """Of the stage, of the flow that resumes it, and of the warm server of the next one."""
    directory = stage(workspace, "rl")
    undisturbed = promised_of(directory)
    shutil.rmtree(stage(workspace, "evaluate_rl"))
    shutil.rmtree(directory)
    for step, victim in ((3, "stage"), (4, "flow"), (5, "warm server")):
        hold = Hold(tmp_path, "rl", step)
        flow = start(workspace, **hold.environment)
        hold.wait(flow)
        program = program_of(directory)
        assert "luffy.pipeline.warm_start" in program.parent().cmdline()
        {"stage": program, "flow": flow, "warm server": program.parent()}[victim].kill()
        said, _ = flow.communicate(timeout=PATIENCE_S)
        assert bool(re.search(r"rl: resume from step \d", said)) == (step > 3), victim
        wait_until(lambda: processes_of(workspace) == [])
        assert not (directory / "manifest.json").exists()
    result = run(workspace)
    assert re.search(r"rl: resume from step \d", result.stdout)
    found = states(result)
    found.pop("report")  # shows times, too, which differ
    assert found.items() <= only("rl", "evaluate_rl").items()
    assert promised_of(directory) == undisturbed


def test_a_run_that_has_nothing_to_make_loads_and_starts_nothing_heavy(workspace):
    result = run(workspace, *UNDISTURBED, PYTHONPROFILEIMPORTTIME="1")
    assert states(result) == only()
    assert "Accuracy in %" in result.stdout
    assert re.search(r"\| +prefect$", result.stderr, re.MULTILINE)
    assert not re.search(rf"\| +({HEAVY})$", result.stderr, re.MULTILINE)
    assert not (workspace / "warm_server.log").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.yaml"], "none.yaml: no such file"),
        ([SMOKE, "rl.stepz=3"], "rl.stepz: unknown key; did you mean 'steps'?"),
        ([SMOKE, "data.train={kind: file, path: none.jsonl}"], "data.train.path: none.jsonl: no such file"),
        ([SMOKE, "--workspace", "/dev/null/w"], "workspace /dev/null/w: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("LUFFY_WORKSPACE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["run", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_ctrl_c_ends_the_stages_that_run_side_by_side(workspace):
    """An evaluation beside training, after those that come before them, which are reused."""
    longer = ("execution.parallel_stages=2", "sft.epochs=5000", "evaluation.max_response_tokens=64")
    flow, begun = start(workspace, SMOKE, *longer), set()
    for line in flow.stdout:
        begun |= set(re.findall(r" (sft|evaluate_base): run", line))
        if begun == {"sft", "evaluate_base"}:
            break
    flow.send_signal(signal.SIGINT)
    _, err = flow.communicate(timeout=PATIENCE_S)
    assert flow.returncode == 130 and "interrupted; the same command resumes" in err, err
    assert processes_of(workspace) == []
    record = json.loads((workspace / "runs/smoke-2/run.json").read_text())
    assert record["state"] == "interrupted"
    assert list(record["stages"]) == ["prepare_data", "base", "sft", "evaluate_base"]

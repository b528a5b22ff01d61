"""The real chain of exp_configs/smoke.yaml through the real flow: reuse, damage, kills, interrupts, mistakes.

One undisturbed run makes a workspace; every other test changes a copy of it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from flow_process import UNDISTURBED, processes_of
from holding import Hold
from patience import PATIENCE_S, wait_until
from prefect_api import shared_api

from luffy.cli.main import main
from luffy.pipeline.lock import holder_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMOKE = "exp_configs/smoke.yaml"
HEAVY = "torch|transformers|tokenizers|deepspeed|vllm|ray|matplotlib|sympy|math_verify"
NODES = ["prepare_data", "base", "sft", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl", "report"]


def start(workspace, *arguments, **environment):
    command = [sys.executable, "flows/full_pipeline.py", *(arguments or (SMOKE,))]
    env = {**os.environ, "LUFFY_WORKSPACE": str(workspace), "PYTHONUNBUFFERED": "1", **environment}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As in a terminal: a shell that runs this in the background has its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(workspace, *arguments, **environment):
    return ended(start(workspace, *arguments, **environment))


def ended(process):
    out, err = process.communicate(timeout=PATIENCE_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def states(result):
    """What each stage's last line says: `{"sft": "reused", ...}`."""
    lines = re.findall(r"^\d\d:\d\d:\d\d (\w+): (\w+)", result.stdout, re.MULTILINE)
    return dict(lines)


def only(*nodes):
    return {name: "finished" if name in nodes else "reused" for name in NODES}


def stage(workspace, node):
    """The directory that the newest run used for `node`."""
    newest = max((workspace / "runs").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    return (newest / "stages" / node).resolve()


def program_of(directory):
    """The process that works in `directory`."""
    return psutil.Process(int(re.search(r"pid (\d+)", holder_of(directory))[1]))


def learned(directory):
    """What a training stage must reproduce bit for bit: weights, and metrics without times."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows]
    return (directory / "model" / "model.safetensors").read_bytes(), metrics


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


@pytest.fixture(scope="module")
def server():
    """A Prefect server that runs already, so that not every run has to start one."""
    return shared_api()


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
    assert "is not empty" in mistakes and "is no stage directory" in mistakes


def test_a_run_is_shown_from_the_raw_data_to_samples(workspace, capsys, monkeypatch):
    monkeypatch.setenv("LUFFY_WORKSPACE", str(workspace))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["show", "smoke"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"prepare_data data\.train arithmetic, generated by seed 7: settings [0-9a-f]{16}", out)
    assert f"model base {stage(workspace, 'base').name}" in out
    assert "rl step 6" in out and "reward/mean" in out and "Accuracy in %" in out
    assert main(["show", "smoke", "--samples", "3", "--reward-max", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.count("rollout, reward 0 (") == 3 and "response:" in out and "<|bos|>" in out


def test_nothing_of_a_run_can_go_until_it_is_given_up(workspace, server, capsys):
    asked = ["gc", "--delete", "--only", "run", "--only", "result", "--workspace", str(workspace)]
    assert main(asked) == 0
    assert "nothing can be deleted" in capsys.readouterr().out
    assert main(["gc", "--delete", "--workspace", str(workspace)]) == 0  # older checkpoints of finished stages
    capsys.readouterr()
    assert states(run(workspace, *UNDISTURBED, "--workspace", str(workspace), **server)) == only()
    assert main([*asked, "--keep-runs", "0"]) == 0
    assert not any((workspace / "runs").iterdir()) and not list((workspace / "stages").glob("*/*"))


def test_a_dry_run_shows_decisions_with_reasons_and_starts_nothing(workspace):
    before = sorted(path.name for path in (workspace / "runs").iterdir())
    command = [sys.executable, "-X", "importtime", "flows/full_pipeline.py", SMOKE, "sft.epochs=3", "--dry-run"]
    env = {**os.environ, "LUFFY_WORKSPACE": str(workspace), "COLUMNS": "160"}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert re.search(r"^base +\w{16} +reused *$", result.stdout, re.MULTILINE)
    assert re.search(r"^sft +\w{16} +run +\d+s +sft.epochs 2 -> 3 \(against \w{16}\)", result.stdout, re.MULTILINE)
    assert not re.search(r"\| +(prefect|torch)$", result.stderr, re.MULTILINE)
    assert sorted(path.name for path in (workspace / "runs").iterdir()) == before
    assert not (workspace / "warm_server.log").exists()


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_a_run_that_its_gpus_cannot_hold_is_refused_before_anything_starts(tmp_path, options):
    config = ["exp_configs/luffy_qwen2.5_math_7b.yaml", "execution.gpu_memory_gb=24"]
    command = [sys.executable, "-X", "importtime", "flows/full_pipeline.py", *config, *options]
    env = {**os.environ, "LUFFY_WORKSPACE": str(tmp_path / "workspace")}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    said = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert result.returncode == 2
    assert said[0].startswith("error: execution.vllm: an engine needs about ")
    assert all("GiB of" in line for line in said)
    assert all("; raise " in line or "; lower " in line for line in said)
    assert ("does not fit" in result.stdout) == bool(options)
    assert not re.search(r"\| +(prefect|torch)$", result.stderr, re.MULTILINE)
    assert not (tmp_path / "workspace").exists()


def test_rl_after_kill_9_equals_an_undisturbed_run_bit_for_bit(workspace, server, tmp_path):
    """Of the stage, of the flow that resumes it, and of the warm server of the next one."""
    directory = stage(workspace, "rl")
    undisturbed = learned(directory)
    shutil.rmtree(stage(workspace, "evaluate_rl"))
    shutil.rmtree(directory)
    for step, victim in ((3, "stage"), (4, "flow"), (5, "warm server")):
        hold = Hold(tmp_path, "rl", step)
        flow = start(workspace, **server, **hold.environment)
        hold.wait(flow)
        program = program_of(directory)
        assert "luffy.pipeline.warm_start" in program.parent().cmdline()
        {"stage": program, "flow": flow, "warm server": program.parent()}[victim].kill()
        said, _ = flow.communicate(timeout=PATIENCE_S)
        assert bool(re.search(r"rl: resume from step \d", said)) == (step > 3), victim
        wait_until(lambda: processes_of(workspace) == [])
        assert not (directory / "manifest.json").exists()
    result = run(workspace, **server)
    assert re.search(r"rl: resume from step \d", result.stdout)
    found = states(result)
    found.pop("report")  # shows times, too, which differ
    assert found.items() <= only("rl", "evaluate_rl").items()
    assert learned(directory) == undisturbed


def test_a_longer_rl_run_continues_and_equals_one_of_that_length_from_the_start(workspace, server):
    longer = ("rl.steps=8", "stages=[prepare_data, base, sft, rl]")
    result = run(workspace, SMOKE, *longer, **server)
    assert re.search(r"rl: continue \w{16} from step 6: rl.steps 6 -> 8", result.stdout)
    continued = stage(workspace, "rl")
    found = learned(continued)
    for directory in (workspace / "stages" / "rl").iterdir():
        shutil.rmtree(directory)
    run(workspace, SMOKE, *longer, **server)
    assert learned(continued) == found


def test_damaged_outputs_run_only_their_stages_and_a_run_without_damage_loads_and_starts_nothing_heavy(
    workspace, server
):
    (stage(workspace, "prepare_data") / "suites" / "longer.parquet").unlink()
    (stage(workspace, "evaluate_base") / "results.json").write_text("{}")
    (stage(workspace, "sft") / "model" / "config.json").unlink()
    found = states(run(workspace, **server))
    found.pop("report")  # shows times, too, which may differ
    assert found.items() <= only("prepare_data", "evaluate_base", "sft").items()
    assert processes_of(workspace) == []
    (workspace / "warm_server.log").unlink(missing_ok=True)
    result = run(workspace, PYTHONPROFILEIMPORTTIME="1", **server)
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


def test_a_mistake_that_a_stage_finds_is_one_line_and_exit_code_2(tmp_path, server):
    (tmp_path / "empty.jsonl").touch()
    result = run(tmp_path, SMOKE, f"data.train={{kind: file, path: {tmp_path}/empty.jsonl}}", **server)
    assert result.returncode == 2
    assert "empty.jsonl" in result.stderr
    assert result.stderr.count("\n") == 1

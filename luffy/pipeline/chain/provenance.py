"""Package versions, commit and hardware that a result was made with. Recorded in manifests, never part of a key."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil

from luffy import __version__

_PACKAGES = ("torch", "transformers", "deepspeed", "ray", "vllm", "math-verify", "pyarrow", "numpy", "prefect")
_REPOSITORY = Path(__file__).resolve().parents[3]


def package_versions() -> dict[str, str]:
    """Versions of Python and of the relevant packages, and the commit of the code if there is one."""
    versions = {"python": platform.python_version(), "luffy": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed
    commit = _commit()
    return {**versions, "commit": commit} if commit else versions


def hardware() -> dict[str, str]:
    """Machine, CPU, memory and GPUs; GPUs only when the stage has loaded torch anyway."""
    facts = {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_cores": str(os.cpu_count()),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.0f}",
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        facts["gpu"] = ", ".join(names)
    return facts


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    if not (_REPOSITORY / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    answer = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None

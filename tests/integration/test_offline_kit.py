"""deploy/offline: a kit is packed here, and unpacked and used where there is no network."""

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

import pytest
from support.patience import ran
from support.prefect_api import place_empty_database

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PACK = ROOT / "deploy" / "offline" / "pack.py"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
BROUGHT = {"prefect", "rich"}
"""What the kit brings beside luffy; the rest is taken for present on the other machine."""
SHORT = ["smoke", "stages=[prepare_data, base]", "base.steps=4"]
WITHOUT_NETWORK = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def run(*command, **options):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "LUFFY", "PYTHON"))}
    return ran(command, env=kept, **options)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    uv = [sys.executable, "-m", "uv"]
    if run(*uv, "--version").returncode:
        pytest.skip("needs uv: pip install uv")
    if run(*uv, "pip", "compile", "--no-cache", "-", input="packaging\n").returncode:
        pytest.skip("needs the package index")
    installed = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
    freeze = [f"{name}=={version}" for name, version in installed.items() if name not in BROUGHT]
    (folder / "freeze.txt").write_text("\n".join(freeze))
    there = ["--present", folder / "freeze.txt", "--leave-out", "torch,triton,nvidia-*,setuptools"]
    machine = f"{platform.machine()}-manylinux_{platform.libc_ver()[1].replace('.', '_')}"
    options = ["--python", PYTHON, "--platform", machine, "--part-mb", "2"]
    packed = run(sys.executable, PACK, folder / "kit", *options, *there)
    assert packed.returncode == 0, packed.stderr
    return folder / "kit"


@pytest.fixture(scope="module")
def environment(kit, tmp_path_factory):
    """Unpacked without a network, by this Python, whose packages are the ones present."""
    missing = [name for name in ("unshare", "ip") if shutil.which(name) is None]
    if missing or run(*WITHOUT_NETWORK, "true").returncode:
        pytest.skip(f"needs {', '.join(missing) or 'namespaces'}")
    folder = tmp_path_factory.mktemp("unpacked")
    unpacked = run(*WITHOUT_NETWORK, sys.executable, kit / "unpack.py", folder / "env", cwd=folder)
    assert "ok      packages       all requirements are met" in unpacked.stdout, unpacked.stdout + unpacked.stderr
    return folder / "env"


def test_smoke_runs_from_the_kit_without_a_network(environment, tmp_path):
    place_empty_database(tmp_path / "workspace" / "prefect")
    result = run(*WITHOUT_NETWORK, environment / "bin" / "luffy", "run", *SHORT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "base: finished" in result.stdout


def test_what_the_kit_brings_comes_before_what_is_there(environment, tmp_path):
    code = "import luffy, prefect, rich, torch; print(*(m.__file__ for m in (luffy, prefect, rich, torch)), sep='\\n')"
    found = run(environment / "bin" / "python", "-c", code, cwd=tmp_path).stdout.split("\n")[:4]
    assert [Path(path).is_relative_to(environment) for path in found] == [True, True, True, False]
    assert run(environment / "bin" / "prefect", "--help", cwd=tmp_path).returncode == 0


def test_what_is_there_stays_out_of_the_kit(kit):
    pinned = {line.strip(' ",').partition("==")[0] for line in (kit / "manifest.json").read_text().splitlines()}
    assert pinned >= BROUGHT
    assert not pinned & {"torch", "ray", "transformers", "nvidia-ml-py"}
    assert all(part.stat().st_size <= 2_000_000 for part in kit.glob("part-*"))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda part: part.unlink(), "is missing (# parts belong to this kit): copy it again"),
        (lambda part: part.write_bytes(part.read_bytes()[:1000]), "is damaged (1000 of # bytes): copy it again"),
    ],
    ids=["missing", "damaged"],
)
def test_a_part_that_did_not_arrive_is_named_in_one_line(kit, tmp_path, harm, said):
    shutil.copytree(kit, tmp_path / "kit")
    harm(part := sorted((tmp_path / "kit").glob("part-*"))[-1])
    result = run(sys.executable, tmp_path / "kit" / "unpack.py", tmp_path / "env")
    before, after = said.split("#")
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {part} {before}")
    assert result.stderr.endswith(f"{after}\n")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "env").exists()

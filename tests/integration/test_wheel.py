"""The wheel in an empty environment in another folder: what ships is found, and an experiment runs."""

import os
import re
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from support.patience import ran
from support.prefect_api import place_empty_database

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the files that git knows, so that no build leaves anything in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, and git")
    # A checkout of another user is one, too.
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    listed = ran(git, cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    ran([sys.executable, "-m", "pip", "wheel", *options, "."], cwd=source).check_returncode()
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel, which sees the third-party packages of this one and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]  # so that its scripts start this one
    ran([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel]).check_returncode()
    (site / "third_party.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")  # lines of its own .pth stay out
    return folder / "bin"


def run(installed, folder, program, *arguments):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "LUFFY", "PYTHON"))}
    return ran([installed / program, *arguments], cwd=folder, env={**kept, "COLUMNS": "200"})


def test_nothing_but_luffy_becomes_a_top_level_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"luffy", f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"}
    assert {"luffy/flows/full_pipeline.py", "luffy/tasks/session.py"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_installed_package_is_the_one_that_runs(installed, tmp_path):
    code = "import luffy, luffy.flows.launch as launch; print(luffy.__file__, launch.__file__)"
    found = run(installed, tmp_path, "python", "-c", code).stdout.split()
    assert len(found) == 2
    assert all(Path(path).is_relative_to(installed.parent) for path in found)


def test_shipped_experiments_presets_recipes_and_samples_are_found(installed, tmp_path):
    plan = run(installed, tmp_path, "luffy", "plan", "arithmetic", "method=dapo")
    assert plan.returncode == 0, plan.stderr
    assert plan.stdout.count("first run") == 8
    assert run(installed, tmp_path, "luffy", "plan", "own_data").returncode == 0
    recipes = run(installed, tmp_path, "luffy", "config", "luffy_qwen2.5_math_7b", "--given")
    assert recipes.returncode == 0, recipes.stderr
    assert "# data/benchmarks/aime24.yaml:" in recipes.stdout


def test_an_experiment_runs_from_any_folder_and_is_found_again(installed, tmp_path):
    place_empty_database(tmp_path / "workspace" / "prefect")
    short = ["smoke", "stages=[prepare_data, base, evaluate, report]", "base.steps=4"]
    result = run(installed, tmp_path, "luffy", "run", *short)
    assert result.returncode == 0, result.stderr
    assert f"report: {tmp_path}/workspace/runs/smoke-1/report.html" in result.stdout.splitlines()
    again = run(installed, tmp_path, "luffy", "plan", *short)
    assert len(re.findall(r"^\w+ +\w{16} +reused", again.stdout, re.MULTILINE)) == 4, again.stdout

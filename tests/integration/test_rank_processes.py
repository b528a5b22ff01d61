"""`execution.ranks: 2`: two processes learn what one does, and go on to the bit after a kill of either."""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.patience import wait_until
from support.refusals import refused
from support.stages import assert_same_result, only, rows_of

from luffy.config import load_experiment
from luffy.errors import EXIT_FAILURE, ConfigError

pytestmark = pytest.mark.slow
FIRST = ["stages=[prepare_data,base,sft]", "execution.retries=0"]
WHOLE = ["stages=[prepare_data,base,sft,rl]", "execution.retries=0", "rl.steps=8", "execution.checkpoint.rl_every=2"]
TWO = "execution.ranks=2"


def started(workspace: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "luffy", "run", "smoke", *overrides, "--workspace", str(workspace)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ran(workspace: Path, *overrides: str) -> str:
    process = started(workspace, *overrides)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Base and SFT, made by two ranks."""
    workspace = tmp_path_factory.mktemp("two")
    ran(workspace, *FIRST, TWO)
    return workspace


@pytest.fixture(scope="module")
def undisturbed(prepared, tmp_path_factory) -> Path:
    workspace = shutil.copytree(prepared, tmp_path_factory.mktemp("whole") / "w")
    ran(workspace, *WHOLE, TWO)
    return workspace


def test_two_ranks_learn_what_one_learns(prepared, tmp_path):
    ran(tmp_path, *FIRST)
    for stage in ("base", "sft"):
        folders = [only(workspace / "stages", stage) for workspace in (tmp_path, prepared)]
        one, two = ([row["actor/loss"] for row in rows_of(folder)] for folder in folders)
        assert one == pytest.approx(two, rel=1e-4) and one != [one[0]] * len(one)
        assert folders[0].name == folders[1].name, "ranks are no part of the key"


@pytest.mark.parametrize("place", ["rank 0", "rank 1"])
def test_a_killed_rank_ends_the_stage_and_the_same_command_resumes_it_to_the_bit(
    prepared, undisturbed, tmp_path, place
):
    workspace, both = shutil.copytree(prepared, tmp_path / "w"), dict[str, psutil.Process]()
    run = started(workspace, *WHOLE, TWO)

    def ranks() -> bool:
        """Whether RL has taken three steps; then its processes are known."""
        file = next(workspace.glob("stages/rl/*/metrics.jsonl"), None)
        if file is None or len(file.read_text().splitlines()) < 4:
            return False
        for process in psutil.Process(run.pid).children(recursive=True):
            if spawned := [child for child in process.children() if "spawn_main" in " ".join(child.cmdline())]:
                both.update({"rank 0": process, "rank 1": spawned[-1]})
        return bool(both)

    wait_until(ranks)
    both[place].kill()
    output, _ = run.communicate()
    assert run.returncode == EXIT_FAILURE, output
    assert place == "rank 0" or "trainer rank 1 died" in output
    psutil.wait_procs(both.values(), timeout=20)
    assert not any(process.is_running() for process in both.values())
    assert "resume" in ran(workspace, *WHOLE, TWO)
    assert_same_result(only(undisturbed / "stages", "rl"), only(workspace / "stages", "rl"))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["cluster=ray"], ["execution.ranks: 2", "execution.ray.trainer_ranks"]),
        (["rl.engine=vllm"], ["rl.engine: vllm", "execution.ranks"]),
        (["execution.zero_stage=3"], ["execution.zero_stage: 3", "execution.ranks: 2"]),
    ],
)
def test_what_ranks_cannot_do_is_refused(overrides, named):
    with refused(*named, error=ConfigError):
        load_experiment("smoke", [TWO, *overrides])

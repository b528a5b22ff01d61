"""SFT on several ranks: the parameters of one, at every ZeRO stage, and on other ranks after an interruption."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from holding import Hold
from patience import PATIENCE_S
from ranks import on_ranks
from reference.gradient_case import relative_l2, tiny_model
from reference.ray_case import movement, weights_in
from reference.sft_case import ENDS_AFTER, PLAN, sft

pytestmark = pytest.mark.slow
CASES: list[dict[str, object]] = [
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2, "packing": True},
    {"zero_stage": 3, "micro_batch_tokens": 40},
    {"zero_stage": 0, "micro_batch_tokens": 40, "sequence_parallel": 2},
]
SHARED = "execution.sequence_parallel=2"
DRIVER = Path(__file__).with_name("ray_run.py")


def on_two_ranks(runs: list[dict[str, object]]) -> list[list[dict[str, float]]]:
    return on_ranks("sft_worker.py", runs)


def folder(root: Path, name: str) -> Path:
    (root / name).mkdir()
    return root / name


@pytest.fixture
def start(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "start")
    return tmp_path / "start"


@pytest.fixture
def alone(tmp_path: Path, start: Path) -> tuple[Path, list[dict[str, float]]]:
    """The model folder and the metrics of a run on one rank."""
    out = folder(tmp_path, "alone")
    return out / "model", sft(start, out, zero_stage=0)


def assert_same(found: Path, expected: Path, start: Path) -> None:
    parameters, wanted = weights_in(found), weights_in(expected)
    assert relative_l2(parameters, wanted) < 1e-5
    # Most of a parameter is its start, so that an error of scale shows in the way from there alone.
    assert relative_l2(movement(found, start), movement(expected, start)) < 1e-3


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_two_ranks_learn_what_one_learns(
    tmp_path: Path, start: Path, alone: tuple[Path, list[dict[str, float]]]
) -> None:
    runs = [{"model": start, "out": folder(tmp_path, str(index)), **case} for index, case in enumerate(CASES)]
    for run, history in zip(runs, on_two_ranks(runs), strict=True):
        assert_same(Path(str(run["out"])) / "model", alone[0], start)
        assert len(history) == PLAN.steps
        for found, wanted in zip(history, alone[1], strict=True):
            assert untimed(found) == pytest.approx(untimed(wanted), rel=1e-4)


def test_an_interrupted_run_resumes_on_a_different_number_of_ranks(
    tmp_path: Path, start: Path, alone: tuple[Path, list[dict[str, float]]]
) -> None:
    resumed_at, from_one = ENDS_AFTER - 1, folder(tmp_path, "from_one")
    shared: list[dict[str, object]] = [{"zero_stage": 2}, {"zero_stage": 3, "sequence_parallel": 2}]
    runs = [
        {"model": start, "out": folder(tmp_path, f"from_two_{i}"), "ends": True, **settings}
        for i, settings in enumerate(shared)
    ]
    on_two_ranks(runs)
    for out in (Path(str(run["out"])) for run in runs):
        assert len(sft(start, out, start=resumed_at, zero_stage=0)) == PLAN.steps - resumed_at
        assert_same(out / "model", alone[0], start)
    sft(start, from_one, zero_stage=0, ends=True)
    on_two_ranks([{"model": start, "out": from_one, "zero_stage": 3, "start": resumed_at}])
    assert_same(from_one / "model", alone[0], start)


def test_the_stage_survives_the_death_of_a_rank_and_sigterm_under_ray(tmp_path: Path) -> None:
    """With `cluster: ray` SFT has as many ranks as RL, here sharing sequences; a lost one ends the stage, which then
    resumes."""

    def run(*overrides: str, **environment: str) -> subprocess.Popen[str]:
        chain = ["chain=sft_then_luffy", "execution.ray={trainer_ranks: 2, start_timeout_s: 600, call_timeout_s: 600}"]
        given = [SHARED, f"execution.grace_s={PATIENCE_S}", *overrides]
        command = [sys.executable, str(DRIVER), str(tmp_path), "prepare_data,base,sft", *chain, *given]
        return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)

    def struck_at_step_3(strike: Callable[[list[psutil.Process]], None]) -> tuple[int, str]:
        """Exit code and output of a run whose stage's processes are struck there."""
        hold = Hold(tmp_path, "sft", 3)
        driver = run(**hold.environment)
        try:
            hold.wait(driver)
            strike(psutil.Process(driver.pid).children(recursive=True))
            hold.release()
            said, _ = driver.communicate(timeout=PATIENCE_S)
        finally:
            driver.kill()
        return driver.returncode, said

    def kill_a_rank(processes: list[psutil.Process]) -> None:
        ranks = [process for process in processes if "ray::RankActor" in process.name()]
        assert len(ranks) == 2
        ranks[0].kill()

    def end_all(processes: list[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()

    code, said = struck_at_step_3(kill_a_rank)
    assert code != 0
    assert re.search(r"trainer rank \d died", said)
    code, said = struck_at_step_3(end_all)
    assert (code, "sft was asked to end: step 3 of 4 is saved" in said) == (75, True), said
    (stage,) = (tmp_path / "stages" / "sft").iterdir()
    assert not (stage / "manifest.json").exists()
    said, _ = (again := run()).communicate(timeout=PATIENCE_S)
    assert again.returncode == 0, said
    assert "resume from step 3" in said
    ray_model = (stage / "model").rename(tmp_path / "on_two_ranks")
    (stage / "manifest.json").unlink()
    for path in (stage / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    said, _ = (alone := run("cluster=local", "rl.max_staleness=0", "execution.sequence_parallel=1")).communicate(
        timeout=PATIENCE_S
    )
    assert alone.returncode == 0, said
    assert relative_l2(weights_in(ray_model), weights_in(stage / "model")) < 1e-5

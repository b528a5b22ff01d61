"""SFT on several ranks: the parameters of one, at every ZeRO stage, and on other ranks after an interruption."""

import contextlib
from pathlib import Path

import psutil
import pytest
from reference.gradient_case import relative_l2, tiny_model
from reference.ray_case import movement, weights_in
from reference.sft_case import ENDS_AFTER, PLAN, sft
from stages_in_thread import RayStagesInThread
from support.holding import Hold
from support.patience import PATIENCE_S, wait_until
from support.ranks import on_ranks

from luffy.errors import EXIT_TEMPORARY
from luffy.tracking.metrics import without_times

pytestmark = pytest.mark.slow
CASES: list[dict[str, object]] = [
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2, "packing": True},
    {"zero_stage": 3, "micro_batch_tokens": 40},
    {"zero_stage": 0, "micro_batch_tokens": 40, "sequence_parallel": 2},
]
UNDER_RAY = (
    "chain=sft_then_luffy",
    "execution.ray={trainer_ranks: 2, start_timeout_s: 600, call_timeout_s: 600}",
    "execution.sequence_parallel=2",
    f"execution.grace_s={PATIENCE_S}",
)


def folder(root: Path, name: str) -> Path:
    (root / name).mkdir()
    return root / name


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    start = tmp_path_factory.mktemp("start")
    tiny_model().save_pretrained(start)
    return start


@pytest.fixture(scope="module")
def alone(tmp_path_factory, start) -> tuple[Path, list[dict[str, float]]]:
    """The model folder and the metrics of a run on one rank."""
    out = tmp_path_factory.mktemp("alone")
    return out / "model", sft(start, out, zero_stage=0)


def assert_same(found: Path, expected: Path, start: Path) -> None:
    parameters, wanted = weights_in(found), weights_in(expected)
    assert relative_l2(parameters, wanted) < 1e-5
    # Most of a parameter is its start, so that an error of scale shows in the way from there alone.
    assert relative_l2(movement(found, start), movement(expected, start)) < 1e-3


def test_two_ranks_learn_what_one_learns(tmp_path, start, alone):
    runs = [{"model": start, "out": folder(tmp_path, str(index)), **case} for index, case in enumerate(CASES)]
    for run, history in zip(runs, on_ranks("supervised", runs), strict=True):
        assert_same(Path(str(run["out"])) / "model", alone[0], start)
        assert len(history) == PLAN.steps
        for found, wanted in zip(history, alone[1], strict=True):
            assert without_times(found) == pytest.approx(without_times(wanted), rel=1e-4)


def test_an_interrupted_run_resumes_on_a_different_number_of_ranks(tmp_path, start, alone):
    resumed_at, from_one = ENDS_AFTER - 1, folder(tmp_path, "from_one")
    shared: list[dict[str, object]] = [{"zero_stage": 2}, {"zero_stage": 3, "sequence_parallel": 2}]
    runs = [
        {"model": start, "out": folder(tmp_path, f"from_two_{i}"), "ends": True, **settings}
        for i, settings in enumerate(shared)
    ]
    on_ranks("supervised", runs)
    for out in (Path(str(run["out"])) for run in runs):
        assert len(sft(start, out, start=resumed_at, zero_stage=0)) == PLAN.steps - resumed_at
        assert_same(out / "model", alone[0], start)
    sft(start, from_one, zero_stage=0, ends=True)
    on_ranks("supervised", [{"model": start, "out": from_one, "zero_stage": 3, "start": resumed_at}])
    assert_same(from_one / "model", alone[0], start)


def test_phases_on_two_ranks_are_those_of_one_and_resume_on_one(tmp_path, start):
    """With ratios to the policy before each two steps; the interrupted run ends in the middle of the second two."""
    alone, shared = folder(tmp_path, "alone"), folder(tmp_path, "shared")
    history = sft(start, alone, zero_stage=0, phased=True)
    assert [abs(row["actor/loss"] + 1) > 1e-3 for row in history] == [False, True, False, True]
    on_ranks("supervised", [{"model": start, "out": shared, "zero_stage": 2, "phased": True, "ends": True}])
    sft(start, shared, zero_stage=0, phased=True, start=ENDS_AFTER - 1)
    assert_same(shared / "model", alone / "model", start)


def test_the_stage_goes_on_after_sigterm_under_ray(tmp_path, request, monkeypatch):
    """With `cluster: ray` SFT has as many ranks as RL, here sharing sequences. `test_ray_stage` loses one."""
    for name, value in Hold(tmp_path, "sft", 3).environment.items():
        monkeypatch.setenv(name, value)
    request.getfixturevalue("warm_stages")  # only now, since a warm server starts no stage in another environment

    def run(*overrides: str) -> RayStagesInThread:
        return RayStagesInThread(tmp_path, "prepare_data,base,sft", *UNDER_RAY, *overrides)

    hold = Hold(tmp_path, "sft", 3)
    with run() as stages:
        wait_until(lambda: hold.is_reached() or stages.is_over(), "the stage's stop")
        assert not stages.is_over(), stages.failure()
        assert len(stages.processes("ray::RankActor")) == 2
        for process in stages.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        hold.release()
        ended = stages.failure()
    assert ended.exit_code == EXIT_TEMPORARY
    assert "sft was asked to end: step 3 of 4 is saved" in str(ended)
    (stage,) = (tmp_path / "stages" / "sft").iterdir()
    assert not (stage / "manifest.json").exists()
    with run() as again:
        again.wait()
    assert "resume from step 3" in again.recorder.texts("planned")
    ray_model = (stage / "model").rename(tmp_path / "on_two_ranks")
    (stage / "manifest.json").unlink()
    for path in (stage / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    with run("cluster=local", "rl.max_staleness=0", "execution.sequence_parallel=1") as alone:
        alone.wait()
    assert relative_l2(weights_in(ray_model), weights_in(stage / "model")) < 1e-5

"""Several ranks learn what one rank or the float64 reference learns, go on where others stopped, and end in order.

Every preset, the critic, adapters and SFT, at every ZeRO stage, over two ranks.
"""

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from reference.elastic_case import assert_resumed_as_if_undisturbed, resume_and_go_on, write_and_go_on
from reference.gradient_case import PRESETS, relative_l2, tiny_model
from reference.learner_case import METHODS, shard_of, trajectories, two_updates
from reference.ray_case import movement, weights_in
from reference.sft_case import ENDS_AFTER, PLAN, sft
from stages_in_thread import RayStagesInThread
from support.holding import Hold
from support.patience import PATIENCE_S, ran, wait_until
from support.ranks import on_ranks, torchrun

from luffy.errors import EXIT_TEMPORARY
from luffy.tracking.metrics import without_times

Settings = dict[str, Any]
ZERO: list[Settings] = [
    *({"zero_stage": stage} for stage in range(4)),
    {"zero_stage": 2, "offload_optimizer": True},
    {"zero_stage": 3, "offload_optimizer": True},
]
LEARNED: tuple[tuple[Settings, list[str]], ...] = (
    ({"zero_stage": 2, "packing": True}, ["luffy", "opd", "reinforce_pp", "uft"]),
    ({"zero_stage": 3}, METHODS),
)
"""With the presets that learn so: all with sharded models, one of each kind in packed rows."""


@pytest.mark.slow
def test_two_ranks_give_the_reference_gradient_and_step(tmp_path):
    """Each preset with one setting, as no loss knows of ZeRO; `luffy`, which has three splits, with all."""
    of_preset = {preset: [ZERO[place // 2 % len(ZERO)]] for place, preset in enumerate(PRESETS)}
    of_preset["luffy"] = ZERO
    found = on_ranks("steps", of_preset, tmp_path)
    assert len(found) == len(PRESETS) - 1 + 3 * len(ZERO)
    for case, errors in found.items():
        # The movement is 1e-3 of the parameters, so float32 rounding of the parameters shows in its fourth digit.
        assert max(errors["gradient"], errors["parameters"]) < 1e-5 and errors["movement"] < 1e-3, (case, errors)


@pytest.mark.slow
def test_two_ranks_give_the_reference_step_of_the_critic_and_of_an_adapter(tmp_path):
    critic, adapter = on_ranks("several", [("critic", [[0, 2, 3]]), ("adapter_steps", [ZERO, tmp_path])])
    assert (len(critic), len(adapter)) == (3 * 3, len(ZERO) + 2)
    for case, errors in critic.items():
        assert max(errors.values()) < 1e-5, (case, errors)
    for case, errors in adapter.items():
        assert errors.pop("movement") < 1e-3, case
        assert errors.keys() == {"gradient", "exported", "reference"} and max(errors.values()) < 1e-5, (case, errors)


@pytest.mark.slow
def test_two_ranks_learn_what_the_reference_learns_and_count_groups_that_are_split_once():
    _, alone = two_updates("luffy")
    for found, (_, presets) in zip(on_ranks("learner", LEARNED), LEARNED, strict=True):
        assert set(found["errors"]) == {*presets, "one demonstration", "moving average"}
        for case, error in found["errors"].items():
            assert error < 1e-4, (case, error)
        assert found["silent"]["luffy"] == alone["batch/zero_advantage_share"]
    rows, index = trajectories("luffy", num_groups=5)
    of_rank = [set(shard_of(rows, index, "luffy", 2, rank).groups) for rank in (0, 1)]
    assert of_rank[0] & of_rank[1]


STATES = [  # ZeRO when written and when resumed, the weights' type, and what is trained
    *((*zero, "float32", "models") for zero in ((0, 0), (2, 2), (3, 3), (3, 0))),
    (1, 1, "bfloat16", "models"),  # a class of its own
    (2, 3, "bfloat16", "models"),
    *((*zero, "float32", "adapter") for zero in ((0, 0), (2, 2), (3, 3), (2, 0), (3, 1))),
]
ADAPTER = {"rank": 4}
PHASED = {"phased": True}
"""With ratios to the policy before each two steps; what ends early ends in the middle of the second two."""
WHOLE: list[Settings] = [
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2, "packing": True},
    {"zero_stage": 3, "micro_batch_tokens": 40},
    {"zero_stage": 1, **ADAPTER},
    {"zero_stage": 2, "packing": True, **ADAPTER},
    {"zero_stage": 3, "micro_batch_tokens": 40, **ADAPTER},
]
ENDED: list[Settings] = [
    {"zero_stage": 2, "ends": True},
    {"zero_stage": 3, "ends": True},
    {"zero_stage": 2, "ends": True, **ADAPTER},
    {"zero_stage": 2, "ends": True, **PHASED},
]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    start = tmp_path_factory.mktemp("start")
    tiny_model().save_pretrained(start)
    return start


def kind_of(run: Settings) -> Settings:
    return {name: run[name] for name in (*ADAPTER, *PHASED) if name in run}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, start) -> dict[str, tuple[Path, list[dict[str, float]]]]:
    """The model folder and the metrics of a run on one rank, by its kind."""
    found = {}
    for kind in ({}, ADAPTER, PHASED):
        out = tmp_path_factory.mktemp("alone")
        found[str(kind)] = out / "model", sft(start, out, zero_stage=0, **kind)
    assert [abs(row["actor/loss"] + 1) > 1e-3 for row in found[str(PHASED)][1]] == [False, True, False, True]
    moved = movement(found[str(ADAPTER)][0], start)
    assert moved["model.layers.0.mlp.up_proj.weight"].any() and not moved["lm_head.weight"].any()
    return found


@pytest.fixture(scope="module")
def on_two(tmp_path_factory, start) -> dict[str, Any]:
    """What two ranks leave: states that one resumes, runs of SFT, and what they are told of faults."""
    folder = tmp_path_factory.mktemp("two")
    states = [folder / str(place) for place, _ in enumerate(STATES)]
    runs = [{"model": start, "out": folder / f"sft_{place}", **run} for place, run in enumerate([*WHOLE, *ENDED])]
    for run in runs:
        run["out"].mkdir()
    orders = [
        ("write", [[(path, written, *what) for path, (written, _, *what) in zip(states, STATES, strict=True)]]),
        ("faults", [folder / "faults"]),
        ("supervised", [runs]),
    ]
    _, faults, histories = on_ranks("several", orders)
    return {"states": states, "faults": faults, "runs": list(zip(runs, histories, strict=True))}


def assert_same(found: Path, expected: Path, start: Path) -> None:
    parameters, wanted = weights_in(found), weights_in(expected)
    assert relative_l2(parameters, wanted) < 1e-5
    # Most of a parameter is its start, so that an error of scale shows in the way from there alone.
    assert relative_l2(movement(found, start), movement(expected, start)) < 1e-3


@pytest.mark.slow
def test_sft_on_two_ranks_learns_what_it_learns_on_one(start, alone, on_two):
    for run, history in on_two["runs"][: len(WHOLE)]:
        model, wanted = alone[str(kind_of(run))]
        assert_same(run["out"] / "model", model, start)
        assert len(history) == PLAN.steps
        for found, expected in zip(history, wanted, strict=True):
            assert without_times(found) == pytest.approx(without_times(expected), rel=1e-4)


@pytest.mark.slow
def test_sft_that_ended_on_two_ranks_resumes_on_one(start, alone, on_two):
    for run, _ in on_two["runs"][len(WHOLE) :]:
        history = sft(start, run["out"], start=ENDS_AFTER - 1, zero_stage=0, **kind_of(run))
        assert len(history) == PLAN.steps - (ENDS_AFTER - 1)
        assert_same(run["out"] / "model", alone[str(kind_of(run))][0], start)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(STATES)), ids=[str(state) for state in STATES])
def test_what_two_ranks_wrote_one_resumes(place, on_two):
    stage, (_, read, dtype, what) = on_two["states"][place], STATES[place]
    resume_and_go_on(stage, read, dtype, what)
    assert_resumed_as_if_undisturbed(stage, dtype)


@pytest.mark.slow
def test_no_rank_waits_for_one_that_failed_at_a_checkpoint(on_two):
    for told, fault in zip(on_two["faults"], ("CheckpointError: rank 1 failed", "OSError: "), strict=True):
        for what in ("write_engine", "read_engine"):
            assert told[what].startswith(fault) and told[what].endswith("no space left")
        assert "the ranks see different checkpoints" in told["step"] and told["newest"] == "1"


@pytest.mark.slow
def test_what_one_rank_wrote_two_resume(tmp_path, start, alone):
    stages = [tmp_path / str(place) for place, _ in enumerate(STATES)]
    for stage, (written, _, *what) in zip(stages, STATES, strict=True):
        write_and_go_on(stage, written, *what)
    sft(start, tmp_path, zero_stage=0, ends=True)
    layouts = [(stage, read, *what) for stage, (_, read, *what) in zip(stages, STATES, strict=True)]
    rest = {"model": start, "out": tmp_path, "zero_stage": 3, "start": ENDS_AFTER - 1}
    on_ranks("several", [("resume", [layouts]), ("supervised", [[rest]])])
    for stage, (_, _, dtype, _) in zip(stages, STATES, strict=True):
        assert_resumed_as_if_undisturbed(stage, dtype)
    assert_same(tmp_path / "model", alone["{}"][0], start)


UNDER_RAY = (
    "chain=sft_then_luffy",
    "execution.ray={trainer_ranks: 2, start_timeout_s: 600, call_timeout_s: 600}",
    f"execution.grace_s={PATIENCE_S}",
)


@pytest.mark.slow
def test_sft_under_ray_goes_on_after_sigterm(tmp_path, request, monkeypatch):
    """With `cluster: ray` SFT has as many ranks as RL. `test_ray_stage` loses one."""
    hold = Hold(tmp_path, "sft", 3)
    for name, value in hold.environment.items():
        monkeypatch.setenv(name, value)
    request.getfixturevalue("warm_stages")  # only now, since a warm server starts no stage in another environment

    def run(*overrides: str) -> RayStagesInThread:
        return RayStagesInThread(tmp_path, "prepare_data,base,sft", *UNDER_RAY, *overrides)

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
    with run("cluster=local", "rl.max_staleness=0") as alone:
        alone.wait()
    assert relative_l2(weights_in(ray_model), weights_in(stage / "model")) < 1e-5


# The main thread goes on to the end without giving the GIL up, while gloo's thread waits for it to release a tensor.
RANK = """
import ctypes, os, sys
import torch
import torch.distributed as dist
from luffy.processes import exit_without_finalizing
from luffy.training.ranks import init_process_group

def gather():
    dist.all_gather([torch.zeros(1000) for _ in range(dist.get_world_size())], torch.ones(1000))

init_process_group()
kept = dist.group.WORLD  # as DeepSpeed keeps it
dist.barrier()
sys.setswitchinterval(1000)
gather()
ctypes.PyDLL(None).usleep(200_000)
sys.stdout.write("done")  # without a line's end it is written at the end of the process
exit_without_finalizing(3)
"""


@pytest.mark.slow
def test_two_ranks_end_with_their_code_and_their_output_whatever_the_threads_of_gloo_do(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    done = torchrun(2, str(script))
    assert "terminate called" not in done.stderr
    assert done.stdout.endswith("donedone"), done.stdout  # after what DeepSpeed says
    codes = re.findall(r"exitcode *: (-?\d+)", done.stderr)
    assert "3" in codes and "-6" not in codes, done.stderr


@pytest.mark.parametrize("ending", ["print('late')", "raise SystemExit(5)"])
def test_threads_and_exit_handlers_finish_first(ending):
    code = f"""
import atexit, threading
from luffy.processes import exit_without_finalizing
atexit.register(print, "handler")
go_on = threading.Event()
def late():
    go_on.wait()
    {ending}
threading.Thread(target=late).start()
atexit.register(print, "first")
threading.Timer(0, go_on.set).start()
exit_without_finalizing(4)
"""
    done = ran([sys.executable, "-c", code])
    assert done.returncode == 4
    assert done.stdout.split() == [*(["late"] if "late" in ending else []), "first", "handler"]

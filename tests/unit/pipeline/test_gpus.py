"""How many GPUs a stage takes, and that two stages never get the same; the driver is a script in nvidia-smi's place."""

import os
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.patience import PATIENCE_S, wait_until

from luffy.cli.main import main
from luffy.config import load_experiment
from luffy.errors import EXIT_INTERRUPTED, EXIT_TEMPORARY, ConfigError, LostError, StageFailed
from luffy.pipeline import gpus
from luffy.pipeline.gpus import gpus_of_stage, own_gpus

CONFIGS = Path(__file__).parents[3] / "exp_configs"
DISAGGREGATED = ["execution.vllm.tensor_parallel_size=2", "execution.ray.placement=disaggregated"]
HOLDER = """\
import sys, tempfile, time
from luffy.pipeline.gpus import own_gpus
tempfile.tempdir = sys.argv[1]
with own_gpus(1, print, bool) as shown:
    print(shown["CUDA_VISIBLE_DEVICES"], flush=True)
    time.sleep(7200)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with two GPUs, and lock files of its own."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '0, GPU-aa, 81920'\necho '1, GPU-bb, 81920'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gpus, "_POLL_S", 0.02)
    monkeypatch.setattr(gpus, "_DRIVER_PAUSE_S", 0.02)
    return tmp_path


@pytest.fixture
def sick(machine):
    """Until this file is gone, the driver of `machine` fails."""
    file = machine / "sick"
    file.touch()
    works = (machine / "nvidia-smi").read_text().removeprefix("#!/bin/sh\n")
    (machine / "nvidia-smi").write_text(f"#!/bin/sh\ntest -e {file} && exit 9\n{works}")
    return file


def test_each_stage_is_shown_gpus_of_its_own(machine):
    with own_gpus(1) as first, own_gpus(1) as second:
        assert {first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]} == {"0", "1"}
        assert first["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    with own_gpus(2) as both:
        assert both["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_gpus_keep_the_names_that_the_user_has_given_them(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    with own_gpus(1) as shown:
        assert shown == {"CUDA_VISIBLE_DEVICES": "GPU-b"}


def test_a_stage_that_finds_too_few_gpus_waits_and_holds_none(machine):
    told, got = [], []

    def two():
        with own_gpus(2, told.append) as shown:
            got.append(shown["CUDA_VISIBLE_DEVICES"])

    with own_gpus(1):
        waiter = threading.Thread(target=two)
        waiter.start()
        wait_until(lambda: told)
        assert not got
        with own_gpus(1):  # the other one is still to be had
            pass
    waiter.join(PATIENCE_S)
    assert (got, told) == (["0,1"], ["2 of 2 GPUs"])


def test_a_run_that_is_stopped_waits_no_longer_for_gpus_or_their_driver(machine, sick):
    with pytest.raises(StageFailed), own_gpus(1, stopped=lambda: True):
        pass
    sick.unlink()
    with own_gpus(2), pytest.raises(StageFailed) as caught, own_gpus(1, stopped=lambda: True):
        pass
    assert caught.value.exit_code == EXIT_INTERRUPTED


def test_more_gpus_than_exist_are_refused_in_one_line(machine):
    with pytest.raises(ConfigError, match="takes 3 GPUs, this machine has 2") as caught, own_gpus(3):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("visible", ["7", "0,7", "0,0", "0,GPU-aa", "GPU-", "GPU-cc"])
def test_a_gpu_that_is_not_there_or_named_twice_is_refused_in_one_line(machine, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = f"^CUDA_VISIBLE_DEVICES={visible}: names a GPU that this machine has not, or one twice; it has 0, 1; correct"
    with pytest.raises(ConfigError, match=said) as caught, own_gpus(1):
        pass
    assert "\n" not in str(caught.value)
    assert main(["plan", "smoke"]) == 2


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_a_plan_says_that_the_gpus_of_the_machine_are_hidden(machine, monkeypatch, capsys, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with own_gpus(1) as shown:
        assert shown == {}
    assert main(["plan", "smoke", "--workspace", str(machine)]) == 0
    assert "CUDA_VISIBLE_DEVICES hides the GPUs of this machine" in capsys.readouterr().out


def test_the_death_of_the_holder_frees_its_gpu(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    command = [sys.executable, "-c", HOLDER, str(machine)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."})
    assert holder.stdout is not None
    assert holder.stdout.readline() == "1\n"
    told = []
    threading.Timer(0.3, holder.kill).start()
    with own_gpus(1, told.append) as shown:
        assert shown == {"CUDA_VISIBLE_DEVICES": "1"}
    assert told == ["1 of 1 GPUs"]
    holder.wait()


def test_a_stage_waits_for_a_driver_that_fails_for_a_moment_and_takes_no_gpu_of_another(machine, sick):
    told = []

    def waiting(what):
        told.append(what)
        sick.unlink(missing_ok=True)

    with own_gpus(1, waiting=waiting) as first, own_gpus(1, waiting=told.append) as second:
        assert {first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]} == {"0", "1"}
    assert told == ["the NVIDIA driver, which does not respond"]


def test_a_driver_that_never_responds_is_a_temporary_failure(sick):
    told = []
    with pytest.raises(LostError, match=r"6 times .* execution\.gpus=0") as caught, own_gpus(1, told.append):
        pass
    assert (caught.value.exit_code, len(told)) == (EXIT_TEMPORARY, 1)


def test_the_turn_comes_before_the_gpu_and_only_for_stages_that_take_one(machine, monkeypatch):
    asked = []

    @contextmanager
    def turn(wanted, waiting, stopped):
        asked.append(wanted)
        yield

    with own_gpus(0, turn=turn) as nothing, own_gpus(2, turn=turn):
        assert nothing == {}
    monkeypatch.setenv("PATH", "/nowhere")
    with own_gpus(1, turn=turn) as on_the_cpu:
        assert on_the_cpu == {}
    assert asked == [2]


@pytest.mark.parametrize(
    ("file", "overrides", "expected"),
    [
        ("smoke", [], {"prepare_data": 0, "base": 1, "sft": 1, "rl": 1, "evaluate": 1, "sweep": 1, "report": 0}),
        ("smoke", ["execution.gpus=0"], {"prepare_data": 0, "base": 0, "rl": 0, "report": 0}),
        ("smoke", ["execution.gpus=2"], {"prepare_data": 0, "sft": 2, "report": 0}),
        ("luffy_qwen2.5_math_7b", [], {"base": 0, "rl": 8, "evaluate": 8, "sweep": 8}),
        ("luffy_qwen2.5_math_7b", DISAGGREGATED, {"evaluate": 16, "rl": 24}),
        ("luffy_qwen2.5_math_7b", ["difficulty={}", "execution.vllm.engines=3"], {"difficulty": 3, "evaluate": 3}),
        ("luffy_qwen2.5_math_7b_2nodes", [], {"rl": 0, "evaluate": 8}),
    ],
)
def test_a_stage_takes_the_gpus_that_it_uses(file, overrides, expected):
    config = load_experiment(CONFIGS / f"{file}.yaml", overrides)
    assert {stage: gpus_of_stage(config, stage) for stage in expected} == expected

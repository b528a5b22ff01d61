"""What all stage programs share: what an attempt leaves to the next one, which code a stage refuses, and its CPU."""

import asyncio
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.patience import ran
from support.refusals import refused
from support.stages import CONFIGS

from luffy.config import load_experiment
from luffy.config.execution import ExecutionConfig
from luffy.http_client import Answer, HTTPClient, RequestLimits
from luffy.pipeline.events import EVENTS_FILE, EventReader, EventWriter
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.job import JOB_FILE, read_job, write_job
from luffy.pipeline.manifest import MANIFEST_FILE, Manifest, read_manifest, write_manifest
from luffy.pipeline.reuse import newest_checkpoint
from luffy.pipeline.workspace import Workspace
from luffy.stages import program
from luffy.stages.program import StageContext, StageResult, run_program

PLANNED = {"luffy.data.schema": "1" * 16, "luffy.types": "2" * 16}
EDITED = {**PLANNED, "luffy.data.schema": "f" * 16}


class Bench:
    """An experiment whose first stage is ready to start."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        patch.setattr(program, "receive_stop_requests", lambda: None)  # pytest keeps its own signal handlers
        config = load_experiment(CONFIGS / "smoke.yaml")
        self.experiment = open_experiment(config, Workspace(root), code=lambda kind, rooms: PLANNED)
        self.plan = self.experiment.plan_node("prepare_data")
        self.out = self.plan.directory
        self.prepare()

    def prepare(self, **changes: object) -> None:
        """Write the job, with such changes."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_job(self.out / JOB_FILE, self.experiment.job(self.plan).model_copy(update=changes))

    def start(self, run: Callable[[object, StageContext], StageResult], code: dict[str, str] = PLANNED) -> None:
        self._patch.setattr(program, "code_of", lambda kind, rooms: code)
        run_program("prepare_data", run, ["--config", str(self.out / JOB_FILE), "--out", str(self.out)])

    def attempt(self, code: dict[str, str] = PLANNED, *, killed: bool = False, lasting_s: float = 0.0) -> list[int]:
        """Start the stage with this code; returns the step that it resumed from, empty if it did not run."""
        resumed: list[int] = []

        def run(settings: object, context: StageContext) -> StageResult:
            newest = newest_checkpoint(context.out)
            resumed.append(newest[0] if newest else 0)
            checkpoint = context.out / "checkpoints" / f"step_{resumed[0] + 1:06d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "COMPLETE").touch()
            EventWriter(context.out / EVENTS_FILE, clock=lambda: time.time() + lasting_s).message("at work")
            if killed:
                raise KeyboardInterrupt
            (context.out / "rows").touch()
            return StageResult(("rows",), {})

        self.start(run, code)
        return resumed

    @property
    def manifest(self) -> Manifest:
        found = read_manifest(self.out)
        assert found is not None
        return found


@pytest.fixture
def bench(tmp_path, monkeypatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_code_that_was_edited_since_the_plan_is_refused_before_it_touches_anything(bench, capsys):
    assert bench.attempt(killed=True) == [0]
    assert bench.attempt(EDITED) == []
    assert "luffy.data.schema" in capsys.readouterr().err
    assert bench.attempt() == [1]


def test_what_a_stage_waits_for_long_is_told_to_the_terminal(bench, monkeypatch):
    def run(settings: object, context: StageContext) -> StageResult:
        client = HTTPClient("http://host", None, RequestLimits(1.0, 1.0))
        asyncio.run(client.pause(0, Answer(429, {"error": "slow down"}, "300")))
        return StageResult((), {})

    async def sleep(seconds: float) -> None: ...

    monkeypatch.setattr("luffy.http_client.asyncio.sleep", sleep)
    for _ in range(2):  # the second attempt tells it once, too
        (bench.out / EVENTS_FILE).unlink(missing_ok=True)
        bench.start(run)
        (bench.out / MANIFEST_FILE).unlink()
    (told,) = [event.text for event in EventReader(bench.out / EVENTS_FILE).read() if event.kind == "message"]
    assert not [name for name in ("http://host", "429", "slow down", "300") if name not in told]


def test_a_longer_run_that_is_killed_and_resumed_still_says_which_run_it_continues_unless_that_was_deleted(bench):
    shorter = bench.out.with_name("shorter")
    shorter.mkdir()
    bench.prepare(extends=str(bench.out.with_name("deleted")))  # since the plan
    assert bench.attempt() == [0]
    assert bench.manifest.extended is None
    write_manifest(shorter, bench.manifest.model_copy(update={"key": "shorter"}))
    shutil.rmtree(bench.out)
    bench.prepare(extends=str(shorter))
    assert bench.attempt(killed=True) == [0]
    shutil.rmtree(shorter)
    assert bench.attempt() == [1]
    assert bench.manifest.extended == "shorter"


def test_the_time_of_earlier_attempts_counts_and_of_cleared_work_does_not(bench):
    assert bench.attempt(killed=True, lasting_s=5000.0) == [0]
    job = read_job(bench.out / JOB_FILE)
    bench.prepare(afresh=True)
    assert bench.attempt(killed=True, lasting_s=1000.0) == [0]
    write_job(bench.out / JOB_FILE, job)
    assert bench.attempt(killed=True, lasting_s=200.0) == [1]
    assert bench.attempt() == [2]
    assert 1200.0 <= bench.manifest.earlier_s < 5000.0
    assert bench.manifest.total_s == bench.manifest.attempt_s + bench.manifest.earlier_s


# `execution.cpu_instructions` reaches torch, whether it is loaded before the stage is told or afterwards.

TOLD = """
from luffy.config.execution import ExecutionConfig
from luffy.stages.program import _set_up_cpu
_set_up_cpu(ExecutionConfig(cpu_instructions="avx2"))
import torch
torch.set_num_threads(1), torch.manual_seed(0)
x = torch.randn(300, 300)
print(torch.backends.cpu.get_cpu_capability(), torch.softmax(x @ x, 1).double().sum(0).norm().item().hex())
"""
needs_avx2 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs a CPU with AVX2"
)


@needs_avx2
def test_torch_uses_what_is_chosen_to_the_same_bits_in_both_orders():
    first, then = (ran([sys.executable, "-c", before + TOLD]).stdout.split() for before in ("", "import torch"))
    assert first == then and first[0] == "AVX2"


@needs_avx2
def test_a_process_that_has_chosen_already_is_refused(monkeypatch):
    for name in program._AVX2:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with refused("execution.cpu_instructions"):
        program._set_up_cpu(ExecutionConfig(cpu_instructions="avx2"))

"""Stages with a vLLM engine run in one process: each finds it as a fresh one, and one engine answers for all."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest
from support.installed import needs_no_gpu, needs_vllm
from support.patience import PATIENCE_S, lives, ran, wait_until
from toy_run import Recorder
from vllm_subjects import WIDE

from luffy.config import load_experiment
from luffy.errors import StageFailed
from luffy.pipeline import engine_process
from luffy.pipeline.engine_process import EngineProcess
from luffy.pipeline.events import EventReader
from luffy.pipeline.experiment import ExperimentRun, open_experiment
from luffy.pipeline.supervise import supervise
from luffy.pipeline.workspace import Workspace
from luffy.processes import marked_processes

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OUTPUTS = ("model.safetensors", "samples.jsonl.zst", "results.json")
CHAIN = (
    "exp_configs/smoke.yaml",
    WIDE.replace("128", "256"),
    *("rl.engine=vllm", "evaluation.engine=vllm", "base.steps=60", "rl.steps=3", "execution.vllm.max_num_seqs=16"),
    *("evaluation.only=[retention]", "evaluation.max_response_tokens=24"),
)
STATE = """
import os, signal, sys, threading, torch
print(os.getpid())
print(__name__, sys.argv, sys.stdin.read(), os.getsid(0) == os.getpid(), sys.modules['__main__'].__spec__.name)
print(sorted(os.environ.items()))
print(torch.initial_seed(), torch.get_num_threads(), torch.distributed.get_world_size(), torch.rand(3).tolist())
print(torch.are_deterministic_algorithms_enabled())
print([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)])
print(sorted(os.listdir('/proc/self/fd')), [thread.name for thread in threading.enumerate()])
sys.exit(0)
"""
DISTURBING = """
import os, random, signal, subprocess, sys, torch
from luffy.stop_request import receive_stop_requests
os.environ['ATEN_CPU_CAPABILITY'] = 'default'
del os.environ['PATH']
receive_stop_requests()
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.manual_seed(1)
deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(7200)'
child = subprocess.Popen([sys.executable, '-c', deaf], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline(), child.stdout.close()
print(child.pid)
sys.exit(0)
"""
SUPERVISOR = """
import sys; from pathlib import Path
from luffy.pipeline.engine_process import EngineProcess
from luffy.pipeline.supervise import supervise
command, say = [sys.executable, "-m", "own_probe"], lambda line: print(line, flush=True)
with EngineProcess().use():
    supervise(command, Path(sys.argv[1]), on_event=print, has_engine=True, on_line=say)
"""
LEFT = """
import gc, sys, deepspeed, torch
sys.exit(any(isinstance(one, (deepspeed.DeepSpeedEngine, torch.optim.Optimizer)) for one in gc.get_objects()))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[EngineProcess]:
    """A process in use, into which programs of the module's folder are sent."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("engine")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        for name, code in {"state": STATE, "disturbing": DISTURBING, "left": LEFT}.items():
            (folder / f"{name}_probe.py").write_text(code)
        process = EngineProcess()
        with process.use():
            yield process


@pytest.fixture
def run(shared, tmp_path, monkeypatch):
    """Runs a program in the process, and returns the lines that it prints."""
    token = engine_process._current.set(shared)

    def run(module: str, **options) -> list[str]:
        lines = list[str]()
        out = tmp_path / module
        out.mkdir(exist_ok=True)
        command = [sys.executable, "-m", f"{module}_probe", "--one", "two words"]
        supervise(command, out, on_event=lambda event: None, on_line=lines.append, has_engine=True, **options)
        return lines

    yield run
    engine_process._current.reset(token)


def write(module: str, code: str) -> None:
    (Path(os.environ["PYTHONPATH"].partition(os.pathsep)[0]) / f"{module}_probe.py").write_text(code)


def test_each_stage_finds_what_the_first_has_found(shared, run):
    found = run("state")
    (child,) = run("disturbing")
    assert not lives(int(child))
    assert run("state") == found
    assert "SIG_DFL" in found[-2]


@pytest.mark.parametrize(
    ("code", "failure", "is_lost"),
    [
        ("raise ValueError('wrong')", "failed with exit code 1", False),
        ("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL", True),
    ],
)
def test_after_a_stage_that_fails_or_is_lost_the_next_has_a_fresh_process(shared, run, code, failure, is_lost):
    before = run("state")[0]
    write("own", code)
    with pytest.raises(StageFailed, match=failure) as caught:
        run("own")
    assert caught.value.temporary is is_lost
    assert not lives(int(before))
    assert run("state")[0] != before


def test_a_stage_that_is_stopped_leaves_nothing(shared, run, tmp_path):
    before = run("state")[0]
    write("own", "import time; print('ready', flush=True); time.sleep(7200)")
    with pytest.raises(StageFailed, match="interrupted"):
        run("own", stopped=lambda: "ready" in (tmp_path / "own/log.txt").read_text(), grace_s=0)
    assert not lives(int(before)) and marked_processes(shared._ready.mark) == []


def test_stages_wait_for_one_another_but_not_for_one_on_other_gpus(shared, run, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    write("own", f"import os, sys, time\nwhile os.path.exists({str(hold)!r}): time.sleep(0.1)\nsys.exit(0)")
    write("other", "import os; print(os.getpid(), os.environ['CUDA_VISIBLE_DEVICES'])")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(copy_context().run, run, "own")
        wait_until(lambda: shared._is_taken)
        waiting = pool.submit(copy_context().run, run, "state")
        pid, gpu = run("other", environment={"CUDA_VISIBLE_DEVICES": "1"})[0].split()
        assert gpu == "1" and not waiting.done() and not first.done()
        hold.unlink()
        first.result(PATIENCE_S)
        assert waiting.result(PATIENCE_S)[0] == str(shared._ready.pid) != pid


def test_the_process_ends_with_its_supervisor(tmp_path):
    (tmp_path / "own_probe.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(7200)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = driver.stdout.readline()
        assert lives(int(pid))
        driver.kill()
    wait_until(lambda: not lives(int(pid)))


STARTED = "vLLM engine started"
KEPT = "vLLM engine kept: weights of "


def said(workspace: Path) -> list[tuple[str, str]]:
    """What stages of each kind have told of engines, in order of time; models are named by the stage that made them."""
    files = workspace.glob("stages/*/*/events.jsonl")
    told = [(event.time, file.parts[-3], event.text) for file in files for event in EventReader(file).read()]
    of_engines = [(kind, text) for _, kind, text in sorted(told) if text.startswith("vLLM engine")]
    return [(kind, re.sub(r"/.*| in \d+ s$", "", text)) for kind, text in of_engines]


@needs_vllm
@needs_no_gpu
def test_a_chain_starts_one_engine_whose_stages_have_the_bits_of_a_fresh_one_and_leave_no_trainer(
    shared, run, tmp_path, tmp_path_factory
):
    """In another order than the chain's: each stage once with an engine that it starts, once with one that it is given.

    The chain is base, SFT, RL and three evaluations; of RL and the first two evaluations any may come first.
    """
    chain = tmp_path_factory.mktemp("chain")
    result = ran([sys.executable, "-m", "luffy", "run", *CHAIN, "--workspace", str(chain)], cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    (first, started), *kept = said(chain)
    assert started == STARTED
    assert len(kept) == 3 and all(text.startswith(KEPT) for _, text in kept)
    for stage in ("prepare_data", "base", "sft"):
        shutil.copytree(chain / "stages" / stage, tmp_path / "stages" / stage)
    experiment = open_experiment(load_experiment(ROOT / CHAIN[0], CHAIN[1:]), Workspace(tmp_path))
    apart = ExperimentRun(experiment, experiment.workspace.new_run("apart", {}))
    for node in sorted(("evaluate_sft", "rl"), key=lambda node: node.startswith(first)):
        apart.execute(node, Recorder())
    run("left")
    assert [text for _, text in said(tmp_path)] == [STARTED, f"{KEPT}sft"]
    made = [file for name in OUTPUTS for file in tmp_path.glob(f"stages/**/{name}")]
    assert len(made) == 5
    for file in made:
        assert file.read_bytes() == (chain / file.relative_to(tmp_path)).read_bytes(), file

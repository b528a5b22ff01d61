"""Real stage programs with two vLLM engines under Ray: the same files as with one, also when an engine is killed."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
import torch
from patience import PATIENCE_S, wait_until, wait_until_ended
from synthetic.arithmetic import problems
from synthetic.gated_actors import Gate, GatedEngineActor
from synthetic.stage_jobs import write_stage_job, write_wide_model

from luffy.cluster import engine_pool
from luffy.cluster.engine_pool import EnginePool
from luffy.config.difficulty import DifficultyConfig
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import ExecutionConfig, RayConfig, VLLMConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import DifficultySettings, EvaluateSettings, StageSettings
from luffy.data.parquet import write_prompts
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.stages.evaluate import OUTPUTS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")]
TESTS = Path(__file__).parents[1]
GREEDY_AND_SAMPLED = {"greedy": {"temperature": 0.0}, "hot": {"temperature": 1.0, "num_samples": 2}}
EVALUATION = EvaluateSettings(
    seed=7,
    dtype="float32",
    evaluation=EvaluationConfig.model_validate(
        {
            "decodings": GREEDY_AND_SAMPLED,
            "max_response_tokens": 16,
            "engine": "vllm",
            "suites": {"longer": {"stop": ("12",)}},
        }
    ),
    grading=GradingConfig(),
)
DIFFICULTY = DifficultySettings(
    seed=7,
    dtype="float32",
    difficulty=DifficultyConfig(
        num_samples=2, temperature=1.0, max_response_tokens=8, max_pass_rate=1.0, engine="vllm"
    ),
    grading=GradingConfig(),
)
PARAMS = SamplingParams(1.0, max_response_tokens=16, stop_token_ids=(1,))
REQUESTS = [RolloutRequest((5 + i % 20, 6), seed=i) for i in range(24)]


def execution(engines: int, max_num_seqs: int = 2) -> ExecutionConfig:
    """On one thread each: the number of threads may change the last bits of floats."""
    return ExecutionConfig(
        num_threads=1,
        vllm=VLLMConfig(engines=engines, cpu_kv_cache_gb=0.05, max_num_seqs=max_num_seqs),
        ray=RayConfig(start_timeout_s=PATIENCE_S, call_timeout_s=PATIENCE_S),
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two suites, training prompts and a tiny random model."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "data" / "suites").mkdir(parents=True)
    for name in ("longer", "base"):
        write_prompts(folder / "data" / "suites" / f"{name}.parquet", problems(16))
    write_prompts(folder / "data" / "train.parquet", problems(12))
    card = {"sources": {"train": {}, "suites.longer": {}, "suites.base": {}}}
    (folder / "data" / "card.json").write_text(json.dumps(card))
    write_wide_model(folder / "sft" / "model", seed=0)
    (folder / "data" / "tokenizer").mkdir()
    for file in (folder / "sft" / "model").glob("*token*"):
        (folder / "data" / "tokenizer" / file.name).write_bytes(file.read_bytes())
    return {"data": folder / "data", "model": folder / "sft"}


@contextmanager
def started_stage(
    stage: str, out: Path, settings: StageSettings, inputs: dict[str, Path], engines: int
) -> Iterator[subprocess.Popen[bytes]]:
    """The stage's program; it has to end well within the context."""
    arguments = write_stage_job(out, stage, settings, inputs, execution(engines))
    with (out / "stderr").open("wb") as stderr:
        program = subprocess.Popen([sys.executable, "-m", f"luffy.stages.{stage}", *arguments], stderr=stderr)
    try:
        yield program
        assert program.wait(PATIENCE_S) == 0, (out / "stderr").read_text()
    finally:
        program.terminate()  # it ends its own processes
        program.wait(PATIENCE_S)


def run_stage(stage: str, out: Path, settings: StageSettings, inputs: dict[str, Path], engines: int) -> Path:
    with started_stage(stage, out, settings, inputs, engines):
        return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, inputs: dict[str, Path]) -> Path:
    """The evaluation by one engine, in the stage's own process."""
    out = run_stage("evaluate", tmp_path_factory.mktemp("alone") / "out", EVALUATION, inputs, engines=1)
    assert not (out / "logs").exists()
    return out


def engines_of(program: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(program.pid).children(recursive=True):
        try:
            if "EngineActor" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_two_engines_write_the_same_bytes_as_one_also_when_one_is_killed(
    tmp_path: Path, inputs: dict[str, Path], alone: Path
) -> None:
    out = tmp_path / "out"
    with started_stage("evaluate", out, EVALUATION, inputs, engines=2) as program:
        logs = out / "parts" / "open"
        wait_until(lambda: program.poll() is not None or any(log.stat().st_size for log in logs.glob("*")), "a batch")
        assert program.poll() is None, (out / "stderr").read_text()
        engines = engines_of(program)
        assert len(engines) == 2
        engines[0].kill()
    assert {name: (out / name).read_bytes() == (alone / name).read_bytes() for name in OUTPUTS} == dict.fromkeys(
        OUTPUTS, True
    )
    assert sorted(path.name for path in (out / "logs").iterdir()) == ["engine_0.log", "engine_1.log"]
    assert " died; the same command resumes the stage" in (out / "stderr").read_text()


def test_difficulty_measures_the_same_by_two_engines(tmp_path: Path, inputs: dict[str, Path]) -> None:
    one, two = (
        run_stage("difficulty", tmp_path / str(engines), DIFFICULTY, inputs, engines=engines) for engines in (1, 2)
    )
    shards = sorted(path.name for path in (one / "shards").iterdir())
    assert len(shards) == 3
    assert {name: (one / "shards" / name).read_text() for name in shards} == {
        path.name: path.read_text() for path in (two / "shards").iterdir()
    }
    assert (one / "train.parquet").read_bytes() == (two / "train.parquet").read_bytes()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, inputs: dict[str, Path]) -> Iterator[EnginePool]:
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_pool, "EngineActor", GatedEngineActor)
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setenv("OMP_NUM_THREADS", "1")
        folder = tmp_path_factory.mktemp("pool")
        found = EnginePool.start(
            inputs["model"] / "model", execution(2, max_num_seqs=16), "float32", max_model_len=48, out=folder
        )
        yield found
        found.close()
        found.close()
    assert not ray.is_initialized()
    wait_until_ended(set(psutil.Process().children(recursive=True)) - before)


def gates_of(pool: EnginePool, place: str = "answered") -> list[Gate]:
    return [Gate(member.log, place) for member in pool._engines.members]


def kill_at_its_gate(pool: EnginePool, work: Callable[[], list[Completion]]) -> list[Completion]:
    """What `work` returns; the engine that does it is killed when its first response is complete."""
    gates = gates_of(pool)
    pids = [ray.get(member.handle.pid.remote()) for member in pool._engines.members]
    for gate in gates:
        gate.close()
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        try:
            wait_until(lambda: any(gate.is_reached() for gate in gates), "an engine at its gate")
            busy = next(place for place, gate in enumerate(gates) if gate.is_reached())
        finally:
            for gate in gates:
                gate.open()
        psutil.Process(pids[busy]).kill()
        return working.result(timeout=PATIENCE_S)


def test_two_calls_run_at_the_same_time(pool: EnginePool) -> None:
    """Each engine waits at its gate in the middle of a call until both have come there."""
    expected, gates = pool.generate(REQUESTS, PARAMS), gates_of(pool)
    for gate in gates:
        gate.close()
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(pool.generate, REQUESTS, PARAMS) for _ in range(2)]
        try:
            wait_until(lambda: all(gate.is_reached() for gate in gates), "both engines in the middle of a call")
        finally:
            for gate in gates:
                gate.open()
                if gate.is_reached():
                    gate.release()
        assert [call.result(PATIENCE_S) for call in calls] == [expected, expected]
    assert pool.num_restarts == 0


def test_a_replaced_engine_repeats_the_whole_call_with_the_weights_that_were_loaded_last(
    pool: EnginePool, tmp_path: Path
) -> None:
    before, restarts = pool.generate(REQUESTS, PARAMS), pool.num_restarts
    write_wide_model(tmp_path / "other", seed=1)
    pool.load_weights_from(tmp_path / "other", 5)
    swapped = pool.generate(REQUESTS, PARAMS)
    assert {version for completion in swapped for version in completion.weight_versions} == {5}
    assert [completion.token_ids for completion in swapped] != [completion.token_ids for completion in before]
    assert kill_at_its_gate(pool, lambda: pool.generate(REQUESTS, PARAMS)) == swapped
    assert pool.num_restarts == restarts + 1
    # Both engines have them, the replaced one and the other.
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda _: pool.generate(REQUESTS, PARAMS), range(2)))
    assert both == [swapped, swapped]


def test_an_engine_that_died_idle_is_replaced_when_weights_are_loaded(pool: EnginePool, tmp_path: Path) -> None:
    write_wide_model(tmp_path / "third", seed=2)
    process = psutil.Process(ray.get(pool._engines.members[1].handle.pid.remote()))
    restarts = pool.num_restarts
    process.kill()
    pool.load_weights_from(tmp_path / "third", 6)
    assert pool.num_restarts == restarts + 1
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(lambda _: pool.generate(REQUESTS, PARAMS), range(2))
    assert one == two
    assert {version for completion in one for version in completion.weight_versions} == {6}

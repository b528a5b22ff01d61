"""Stages with two vLLM engines under Ray: the same files as with one, also when an engine is killed.

One pool of engines serves the tests below that of a whole stage program.
"""

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import ray
from stages_in_thread import StagesInThread
from support.installed import needs_no_gpu, needs_vllm
from support.patience import PATIENCE_S, wait_until, wait_until_ended
from synthetic.arithmetic import problems
from synthetic.gated_actors import Gate, GatedEngineActor
from synthetic.stage_jobs import write_stage_job, write_wide_model

from luffy.cluster import ray_engine
from luffy.cluster.engine_pool import EnginePool
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import ExecutionConfig, RayConfig, VLLMConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import EvaluateSettings
from luffy.data.parquet import write_prompts
from luffy.pipeline.supervise import LOG_FILE, supervise
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.stages.evaluate import OUTPUTS

pytestmark = [needs_vllm, pytest.mark.slow, needs_no_gpu, pytest.mark.usefixtures("warm_stages")]
TESTS = Path(__file__).parents[1]
EVALUATION = EvaluateSettings(
    seed=7,
    dtype="float32",
    evaluation=EvaluationConfig.model_validate(
        {
            "decodings": {"greedy": {"temperature": 0.0}, "hot": {"temperature": 1.0, "num_samples": 2}},
            "max_response_tokens": 16,
            "engine": "vllm",
            "suites": {"longer": {"stop": ("12",)}},
        }
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
def inputs(tmp_path_factory) -> dict[str, Path]:
    """Two suites and a tiny random model."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "data" / "suites").mkdir(parents=True)
    for name in ("longer", "base"):
        write_prompts(folder / "data" / "suites" / f"{name}.parquet", problems(16))
    card = {"sources": {"suites.longer": {}, "suites.base": {}}}
    (folder / "data" / "card.json").write_text(json.dumps(card))
    write_wide_model(folder / "sft" / "model", seed=0)
    (folder / "data" / "tokenizer").mkdir()
    for file in (folder / "sft" / "model").glob("*token*"):
        (folder / "data" / "tokenizer" / file.name).write_bytes(file.read_bytes())
    return {"data": folder / "data", "model": folder / "sft"}


def evaluated(out: Path, inputs: dict[str, Path], engines: int) -> Path:
    """Where the stage's program has run to its end."""
    arguments = write_stage_job(out, "evaluate", EVALUATION, inputs, execution(engines))
    supervise([sys.executable, "-m", "luffy.stages.evaluate", *arguments], out, on_event=lambda event: None)
    return out


def test_two_engines_write_the_same_bytes_as_one_also_when_one_is_killed(tmp_path, tmp_path_factory, inputs):
    alone = evaluated(tmp_path_factory.mktemp("alone") / "out", inputs, engines=1)
    out = tmp_path / "out"  # not beside it, whose responses would be reused
    assert not (alone / "logs").exists()
    with StagesInThread(lambda: evaluated(out, inputs, engines=2)) as stage:
        answers = out / "answers.jsonl"
        wait_until(lambda: stage.is_over() or (answers.is_file() and answers.stat().st_size > 0), "a batch")
        assert not stage.is_over(), (out / LOG_FILE).read_text()
        engines = stage.processes("ray::EngineActor")
        assert len(engines) == 2
        engines[0].kill()
        stage.wait()
    assert {name: (out / name).read_bytes() == (alone / name).read_bytes() for name in OUTPUTS} == dict.fromkeys(
        OUTPUTS, True
    )
    assert sorted(path.name for path in (out / "logs").iterdir()) == ["engine_0.log", "engine_1.log"]
    assert " died; the same command resumes the stage" in (out / LOG_FILE).read_text()


@pytest.fixture(scope="module")
def pool(tmp_path_factory, inputs) -> Iterator[EnginePool]:
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_engine, "EngineActor", GatedEngineActor)
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setenv("OMP_NUM_THREADS", "1")
        folder = tmp_path_factory.mktemp("pool")
        model = inputs["model"] / "model"
        found = EnginePool(model, execution(2, max_num_seqs=16), "float32", max_model_len=48, out=folder)
        yield found
        found.close()
        found.close()
    assert not ray.is_initialized()
    wait_until_ended(set(psutil.Process().children(recursive=True)) - before)


def gates_of(pool: EnginePool) -> list[Gate]:
    return [Gate(member.log, "answered") for member in pool._engines.members]


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


def test_two_calls_run_at_the_same_time(pool):
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


def test_a_replaced_engine_repeats_the_whole_call_with_the_weights_that_were_loaded_last(pool, tmp_path):
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

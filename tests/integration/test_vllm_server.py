"""One real vLLM server on CPU, of a model with a tied output head, behind `ServerEngine`."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
import test_vllm_engine
import torch
from reference.gradient_case import ROOT, as_groups, trajectories
from support.installed import needs_vllm
from support.patience import PATIENCE_S, wait_until, wait_until_ended
from synthetic.answered_stage import stage_context
from synthetic.arithmetic import problems, tiny_tokenizer
from test_vllm_engine import CONTEXT, MAX_GAP, PARAMS, PROMPTS, REQUESTS
from transformers import PreTrainedModel, Qwen2ForCausalLM

from luffy.cluster.local import LocalCluster
from luffy.config import load_experiment
from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.config.execution import ExecutionConfig, ServerConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import EvaluateSettings, RLSettings
from luffy.data.parquet import write_prompts
from luffy.errors import ClusterError, ConfigError
from luffy.evaluation.sample_files import read_sample_records
from luffy.pipeline.graph import build_graph
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.server_engine import ServerEngine, check_servers
from luffy.stages import evaluate
from luffy.training.learner import TrainerSpec

pytestmark = [pytest.mark.slow, needs_vllm]
KEY = "secret"
SMALL = "--max-num-seqs 16 --kv-cache-memory-bytes 50000000 --enforce-eager --skip-tokenizer-init"


model_of = partial(test_vllm_engine.model_of, vocab_size=len(tiny_tokenizer()))


def save(model: PreTrainedModel, folder: Path) -> Path:
    tiny_tokenizer().save_pretrained(folder)
    return test_vllm_engine.save(model, folder)


@dataclass
class Served:
    """A running server, and model folders that it sees."""

    config: ServerConfig
    engine: ServerEngine
    folder: Path
    command: list[str]
    process: subprocess.Popen[bytes]

    def of(self, seed: int) -> Path:
        path = self.folder / str(seed)
        return path if path.exists() else save(model_of(seed), path)


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    """By the command, as it says that an experiment uses it."""
    folder = tmp_path_factory.mktemp("models")
    log = folder / "log.txt"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    model = str(save(model_of(0), folder / "0"))
    command = [sys.executable, "-m", "luffy", "serve-engine", model, "--port", port, "--", *SMALL.split()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setenv("OMP_NUM_THREADS", "1")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            line = r"^rl.engine=openai .*$"
            wait_until(lambda: process.poll() is not None or re.search(line, log.read_text(), re.M), "the server")
            said = re.search(line, log.read_text(), re.M)
            assert said, log.read_text()[-3000:]
            patient = (f"execution.server.request_timeout_s={PATIENCE_S}", "execution.server.max_retries=1")
            experiment = load_experiment("smoke", [*shlex.split(said[0]), *patient])
            config = experiment.execution.server
            engine = ServerEngine.connect(config, experiment.model.dtype, max_model_len=CONTEXT)
            yield Served(config, engine, folder, command, process)
            engine.close()
        finally:
            process.kill()  # vLLM ends with it


def test_a_port_that_is_taken_is_one_line(served):
    taken = subprocess.run(served.command, capture_output=True, text=True, check=False)
    assert (taken.returncode, taken.stderr.count("\n")) == (2, 1)
    port = served.config.roots[0].rpartition(":")[2]
    assert f"--port {port}: Address already in use; give another --port" in taken.stderr


def generates(served: Served) -> bool:
    """Whether the server is generating a row right now, by its own metrics."""
    with urllib.request.urlopen(f"{served.config.roots[0]}/metrics", timeout=PATIENCE_S) as answer:
        found = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", answer.read().decode(), re.M)
    return any(float(number) > 0 for number in found)


def expected_logprobs(
    models: dict[int, PreTrainedModel], request: RolloutRequest, completion: Completion, temperature: float
) -> list[float]:
    """Each token's log-probability by a plain forward pass with the weights of its own version."""
    ids = torch.tensor([[*request.prompt_ids, *request.prefix_ids, *completion.token_ids]])
    first = ids.shape[1] - len(completion.token_ids)
    logp_T = {}
    for model in {models[version] for version in completion.weight_versions}:
        with torch.no_grad():
            logits_TV = model(input_ids=ids).logits[0, first - 1 : -1]
        logp_TV = torch.log_softmax(logits_TV / (temperature or 1.0), dim=-1)
        logp_T[model] = logp_TV[torch.arange(len(completion.token_ids)), completion.token_ids].tolist()
    return [logp_T[models[version]][t] for t, version in enumerate(completion.weight_versions)]


largest_gap = partial(test_vllm_engine.largest_gap, expected=expected_logprobs)


def test_logprobs_equal_a_plain_forward_pass_before_and_after_an_update(served):
    said: dict[int, list[tuple[int, ...]]] = {}
    for version in (0, 3, 0):
        served.engine.load_weights_from(served.of(version), version)
        for temperature, params in PARAMS.items():
            completions = served.engine.generate(REQUESTS, params)
            assert {v for c in completions for v in c.weight_versions} == {version}
            assert largest_gap({version: model_of(version)}, REQUESTS, completions, temperature) < MAX_GAP
        said.setdefault(version, [c.token_ids for c in completions])
        assert said[version] == [c.token_ids for c in completions], "the seed decides the draw"
    assert said[0] != said[3]


def test_updates_fall_between_tokens_of_running_rows(served):
    in_turn = [model_of(seed) for seed in range(3)]
    models = {version: in_turn[version % 3] for version in range(60)}
    folders = {version: served.of(version % 3) for version in models}
    served.engine.load_weights_from(folders[0], 0)
    # More than the server runs at once: some wait in its queue.
    requests = [RolloutRequest(PROMPTS[i % 4], seed=i) for i in range(24)]
    params, said = SamplingParams(1.0, max_response_tokens=240, stop_token_ids=()), []
    thread = threading.Thread(target=lambda: said.extend(served.engine.generate(requests, params)), daemon=True)
    thread.start()
    for version in range(1, len(models)):
        wait_until(lambda: generates(served) or not thread.is_alive(), "a row that is being generated")
        if not thread.is_alive():
            break
        served.engine.load_weights_from(folders[version], version)
    thread.join(PATIENCE_S)
    versions = [completion.weight_versions for completion in said]
    assert len(versions) == 24
    assert all(list(row) == sorted(row) and len(row) == 240 for row in versions)
    assert any(len(set(row)) > 1 for row in versions)
    assert largest_gap(models, requests, said, 1.0) < MAX_GAP


def test_the_kv_cache_of_old_weights_is_never_read_again(served):
    # Longer than vLLM's block of 128 tokens on CPU: shorter prompts are never cached.
    request = RolloutRequest(tuple(i % 12 for i in range(200)), seed=1)
    for version in (1, 2):
        served.engine.load_weights_from(served.of(version), version)
        completions = served.engine.generate([request, request], PARAMS[1.0])
        assert largest_gap({version: model_of(version)}, [request, request], completions, 1.0) < MAX_GAP


def test_folders_that_the_server_cannot_load_are_refused_and_change_nothing(served):
    served.engine.load_weights_from(served.of(0), 0)
    other = save(model_of(0, intermediate_size=48), served.folder / "other")
    with pytest.raises(ConfigError, match=r"another model: its intermediate_size is 32, that of .*other is 48"):
        served.engine.load_weights_from(other, 1)
    with pytest.raises(ConfigError, match=r"sees no model folder at .*nowhere"):
        served.engine.load_weights_from(served.folder / "nowhere", 1)
    completions = served.engine.generate(REQUESTS, PARAMS[1.0])
    assert largest_gap({0: model_of(0)}, REQUESTS, completions, 1.0) < MAX_GAP


def test_a_server_that_does_not_fit_is_refused(served, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"start this server with --max-model-len 513 \(it has 512\), --dtype bfloat16 \(luffy serve-"
    ):
        check_servers(served.config, "bfloat16", CONTEXT + 1)
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(ConfigError, match=r"OPENAI_API_KEY .* holds a wrong one"):
        check_servers(served.config, "float32", CONTEXT)


def test_an_evaluation_gives_the_checkpoint_s_weights_to_the_server(served, tmp_path):
    """The server holds other weights before; afterwards greedy responses are the embedded engine's."""
    save(model_of(8), tmp_path / "sft" / "model")
    (tmp_path / "data" / "suites").mkdir(parents=True)
    write_prompts(tmp_path / "data" / "suites" / "base.parquet", problems(6))
    (tmp_path / "data" / "card.json").write_text(json.dumps({"sources": {"suites.base": {}}}))
    for name in ("transformers", "openai"):
        evaluation = EvaluationConfig(
            decodings={"greedy": DecodingConfig(temperature=0.0)}, max_response_tokens=16, engine=name
        )
        settings = EvaluateSettings(seed=7, dtype="float32", evaluation=evaluation, grading=GradingConfig())
        inputs = {"data": tmp_path / "data", "model": tmp_path / "sft"}
        execution = ExecutionConfig(server=served.config)
        evaluate.run(settings, stage_context("evaluate_sft", tmp_path / name, inputs, execution=execution))
    embedded, remote = (
        list(read_sample_records(tmp_path / name / "samples.jsonl.zst")) for name in ("transformers", "openai")
    )
    assert remote == embedded
    assert len({record.response for record in remote}) > 1


def test_rl_takes_its_rollouts_from_the_server(served, tmp_path):
    overrides = [
        "method=luffy", "chain=rl", "rl.engine=openai", f"execution.server.urls=[{served.config.urls[0]}]",
        "rl.max_staleness=1",
    ]  # fmt: skip
    config = load_experiment(ROOT / "exp_configs/smoke.yaml", overrides)
    (settings,) = (node.settings for node in build_graph(config) if node.stage == "rl")
    assert isinstance(settings, RLSettings)
    spec = TrainerSpec(settings, config.execution, served.folder / "start" / "model", tmp_path, CONTEXT, pad_id=0)
    save(model_of(3), spec.model)
    with LocalCluster(spec) as cluster:
        before = cluster.engine.generate(REQUESTS, PARAMS[1.0])
        cluster.trainer.learn(as_groups(*trajectories("luffy")), 1)
        cluster.publish(1)
        after = cluster.engine.generate(REQUESTS, PARAMS[1.0])
        cluster.trainer.export(tmp_path / "model")
    assert not (tmp_path / "published").exists()
    models = {
        version: Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for version, folder in enumerate((spec.model, tmp_path / "model"))
    }
    assert not torch.equal(*(model.lm_head.weight for model in models.values()))
    for version, completions in enumerate((before, after)):
        assert {found for completion in completions for found in completion.weight_versions} == {version}
        assert largest_gap(models, REQUESTS, completions, 1.0) < MAX_GAP


def test_a_server_that_is_asked_to_end_leaves_nothing_and_ends_the_rollout_in_time(served):
    """The last test: it leaves no server."""
    params = SamplingParams(1.0, max_response_tokens=480, stop_token_ids=())
    requests = [RolloutRequest(PROMPTS[i % 4], seed=i) for i in range(200)]  # far more than it runs at once
    failures: list[BaseException] = []

    def generate() -> None:
        try:
            while True:  # a fast machine may end all rows before anybody has looked
                served.engine.generate(requests, params)
        except ClusterError as error:
            failures.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    wait_until(lambda: generates(served), "a row that is being generated")
    started = psutil.Process(served.process.pid).children(recursive=True)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(PATIENCE_S) == 0
    wait_until_ended(started)
    thread.join(PATIENCE_S)
    assert [str(failure).startswith(served.config.roots[0]) for failure in failures] == [True]

"""The RL stage with a vLLM engine in its own process: real steps on CPU, killed and resumed."""

import signal
import subprocess
import sys
from filecmp import cmp
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from installed import needs_no_gpu, needs_vllm
from patience import PATIENCE_S
from test_methods import TWO_UPDATES, assert_same_result, experiment, run_rl, run_stage, upstream_of

from luffy.cluster import local
from luffy.config.execution import VLLMConfig
from luffy.data.templates import decode, load_tokenizer
from luffy.pipeline.graph import build_graph
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import read_metrics, training_rows
from luffy.training.learner import Learner, TrainerRank
from luffy.types import FinishReason, Source

pytestmark = [pytest.mark.slow, needs_vllm, needs_no_gpu]
OVERRIDES = (
    # Of vLLM's CPU attention 32 is the smallest head.
    "model.architecture={hidden_size: 64, intermediate_size: 64, num_layers: 2, num_heads: 2, "
    "max_position_embeddings: 128}",
    "rl.engine=vllm",
    # Every trace ends with it, and so does a right answer.
    "rl.stop=['}']",
    # Fewer than a step's rollouts: some wait for a place.
    "execution.vllm.max_num_seqs=16",
    "rl.validation={every: 2, suites: [longer]}",
)
CONFIG = experiment("luffy", *TWO_UPDATES, *OVERRIDES)
MAX_GAP = 1e-5


@pytest.fixture(scope="module")
def upstream(tmp_path_factory) -> dict[str, Path]:
    """Data and a base policy that is right now and then."""
    return upstream_of(CONFIG, tmp_path_factory.mktemp("upstream"))


@pytest.fixture(scope="module")
def undisturbed(upstream, tmp_path_factory) -> Path:
    """The stage after five steps of two updates each."""
    out = tmp_path_factory.mktemp("undisturbed")
    run_rl(CONFIG, out, upstream)
    return out


def test_every_step_samples_with_the_weights_that_it_trains(undisturbed):
    rows = training_rows(read_metrics(undisturbed / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(0 < row["rollout/logp_gap_mean"] < MAX_GAP for row in rows), rows
    assert all(row["actor/grad_norm"] > 0 for row in rows)


def test_every_sampled_token_carries_the_version_of_its_step(undisturbed):
    journal = RolloutJournal(undisturbed / "journal")
    for step in range(1, 6):
        groups = journal.read(step)
        assert groups is not None
        versions = {
            version
            for group in groups
            for row in group.trajectories
            for version, source in zip(row.weight_version, row.source, strict=True)
            if source is Source.ON_POLICY
        }
        assert versions == {step - 1}


def test_every_validation_is_answered_by_the_weights_of_its_step(undisturbed):
    measured = [row for row in read_metrics(undisturbed / "metrics.jsonl") if "val/longer/accuracy" in row]
    assert [(row["step"], row["val/weight_version"]) for row in measured] == [(0, 0), (2, 2), (4, 4), (5, 5)]


def test_a_partial_rollout_goes_on_where_it_was_interrupted(upstream, tmp_path):
    """The update is too small to change a weight, so every token has its probability under the trainer's policy."""
    config = experiment("luffy", *OVERRIDES[:-1], "rl.optimizer.lr=1e-30", "rl.partial_rollout_tokens=6")
    run_rl(config, tmp_path, upstream)
    rows = training_rows(read_metrics(tmp_path / "metrics.jsonl"))
    assert all(0 < row["rollout/logp_gap_mean"] < MAX_GAP for row in rows), rows
    assert rows[1]["rollout/interrupted_rows"] > 0 and rows[2]["rollout/staleness_mean"] > 0
    groups = RolloutJournal(tmp_path / "journal").read(3) or []
    rollouts = [row for group in groups for row in group.rollouts]
    assert any(len(row.response_ids) > 6 for row in rollouts)
    assert any(len({*row.weight_version}) > 1 for row in rollouts)
    for row in rollouts:  # a step in which no group would be complete has several rounds
        *before, last = sorted({*row.weight_version})
        assert before == [*range(last - len(before), last)] and list(row.weight_version) == sorted(row.weight_version)
        assert all(row.weight_version.count(version) % 6 == 0 for version in before)


@pytest.fixture
def sleeping(monkeypatch) -> list[str]:
    """vLLM with the device's calls replaced: an engine that sleeps has no weights. They are noted in the list."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    turns = list[str]()

    def sleep(worker: CPUWorker, level: int) -> None:
        turns.append(f"sleep {level}")
        for weight in worker.get_model().parameters():
            weight.data.fill_(torch.nan)

    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda platform: True)
    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", lambda worker, tags: turns.extend(tags))
    return turns


def test_a_kept_engine_sleeps_until_it_is_given_the_next_model(upstream, undisturbed, sleeping):
    first, other = upstream["model"] / "model", undisturbed / "model"
    config, requests = VLLMConfig(max_num_seqs=16), [RolloutRequest((5, 6, 7), seed=seed) for seed in range(8)]
    said = []
    engine = VLLMEngine.from_folder(first, config, "float32", max_model_len=64, sleep_mode=True, is_kept=True)
    for folder in (first, other, first):
        if sleeping:
            engine.take_over(folder)
        said.append(engine.generate(requests, SamplingParams(1.0, 20, stop_token_ids=())))
        engine.close()
    assert sleeping == ["sleep 2", *2 * ["weights", "kv_cache", "sleep 2"]]
    assert said[0] == said[2] != said[1]
    engine.shut_down()


def test_an_engine_on_the_trainers_gpu_sleeps_while_it_learns(upstream, undisturbed, sleeping, tmp_path, monkeypatch):
    learn, start = Learner.learn, VLLMEngine.from_folder

    def started(*given, sleep_mode, **options) -> VLLMEngine:
        return start(*given, sleep_mode=True, **options)

    monkeypatch.setattr(local, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setattr(VLLMEngine, "from_folder", started)
    monkeypatch.setattr(Learner, "learn", lambda *given: (sleeping.append("learn"), learn(*given))[1])
    monkeypatch.setattr(TrainerRank, "free_cache", lambda rank: sleeping.append("free"))
    run_rl(CONFIG, tmp_path, upstream)
    # After the last step the validation wakes it once more.
    assert sleeping == ["free"] + 5 * ["sleep 2", "learn", "free", "weights", "kv_cache"]
    assert_same_result(undisturbed, tmp_path)


def test_rollouts_end_with_the_token_that_completes_the_stop_text(upstream, undisturbed):
    tokenizer = load_tokenizer(upstream["model"] / "model")
    groups = RolloutJournal(undisturbed / "journal").read(5) or []
    rollouts = [row for group in groups for row in group.rollouts]
    texts = [decode(tokenizer, row.response_ids) for row in rollouts]
    ended = [(text, row) for text, row in zip(texts, rollouts, strict=True) if "}" in text]
    assert ended
    for text, row in ended:
        assert text.index("}") == len(text) - 1
        assert row.finish_reason is FinishReason.STOP
        assert tokenizer.eos_token_id not in row.response_ids, "nothing is sampled after it"


def test_a_killed_run_resumes_to_the_same_bits(upstream, undisturbed, tmp_path):
    """Killed before the second update of step 3 and resumed from step 2: step 3 is in the journal, steps 4 and 5 are
    generated by an engine that has generated nothing before."""
    arguments = ["luffy", "6", str(tmp_path), str(upstream["data"]), str(upstream["model"]), *OVERRIDES]
    command = [sys.executable, Path(__file__).with_name("killed_run.py"), *arguments]
    assert subprocess.run(command, timeout=PATIENCE_S).returncode == -signal.SIGKILL
    assert run_rl(CONFIG, tmp_path, upstream).resumed_from == 2
    assert_same_result(undisturbed, tmp_path)


VALIDATED = "sft.validation={every: 2, suites: [longer, retention]}"


def run_sft(out: Path, upstream: dict[str, Path], *overrides: str) -> Path:
    config = experiment("sft", *OVERRIDES[:1], "sft.epochs=null", "sft.steps=5", "sft.batch_size=4", *overrides)
    (node,) = (node for node in build_graph(config) if node.stage == "sft")
    run_stage(node, config, out, upstream)
    return out


def validations_of(out: Path) -> list[dict[str, float]]:
    rows = read_metrics(out / "metrics.jsonl")
    return [{n: v for n, v in row.items() if n.startswith(("step", "val/"))} for row in rows if "val/accuracy" in row]


def test_vllm_validates_sft_as_the_embedded_engine_does_and_leaves_training_alone(
    upstream, sleeping, tmp_path, monkeypatch
):
    """As on a GPU: between validations the engine has no weights."""
    start = VLLMEngine.from_folder

    def started(*given, sleep_mode, **options) -> VLLMEngine:
        return start(*given, sleep_mode=True, **options)

    none, embedded = run_sft(tmp_path / "none", upstream), run_sft(tmp_path / "embedded", upstream, VALIDATED)
    cuda = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: sleeping.append("free"))
    monkeypatch.setattr(local, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(VLLMEngine, "from_folder", started)
    by_vllm = run_sft(tmp_path / "vllm", upstream, VALIDATED, "sft.engine=vllm")
    assert sleeping == ["free", "sleep 2"] + 4 * ["free", "weights", "kv_cache", "sleep 2"]
    measured = validations_of(by_vllm)
    assert [(row["step"], row["val/weight_version"]) for row in measured] == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert measured == validations_of(embedded)
    assert (
        len({row["val/longer/mean_tokens"] + row["val/retention/mean_tokens"] for row in measured}) > 1
    )  # other weights
    for other in (embedded, by_vllm):
        assert cmp(none / "model/model.safetensors", other / "model/model.safetensors", shallow=False)

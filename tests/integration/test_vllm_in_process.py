"""The RL stage with a vLLM engine in its own process: real steps on CPU, killed and resumed."""

from filecmp import cmp
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.installed import needs_no_gpu, needs_vllm
from support.kills import before_update, left_at
from support.methods import TWO_UPDATES, experiment, run_rl
from support.stages import assert_same_result, run_stage, upstream_of
from vllm_subjects import WIDE, sleeping_as_on_a_gpu

from luffy.cluster import local
from luffy.config.execution import VLLMConfig
from luffy.data.templates import decode, load_tokenizer
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import read_metrics, training_rows
from luffy.training.learner import Learner, TrainerRank
from luffy.types import FinishReason, Source

pytestmark = [pytest.mark.slow, needs_vllm, needs_no_gpu]
OVERRIDES = (
    WIDE,
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
    """The stage after five steps of two updates each; beside it what a kill in step 3 would have left."""
    out = tmp_path_factory.mktemp("rl") / "undisturbed"
    with left_at(before_update(6), out):
        run_rl(CONFIG, out, upstream)
    return out


def test_every_step_samples_and_validates_with_the_weights_that_it_trains(upstream, undisturbed):
    """Nothing is sampled after the token that completes the stop text."""
    tokenizer, ended = load_tokenizer(upstream["model"] / "model"), 0
    metrics = read_metrics(undisturbed / "metrics.jsonl")
    rows = training_rows(metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(0 < row["rollout/logp_gap_mean"] < MAX_GAP for row in rows), rows
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    measured = [row for row in metrics if "val/longer/accuracy" in row]
    assert [(row["step"], row["val/weight_version"]) for row in measured] == [(0, 0), (2, 2), (4, 4), (5, 5)]
    journal = RolloutJournal(undisturbed / "journal")
    for step in range(1, 6):
        groups = journal.read(step) or []
        rows = [row for group in groups for row in group.trajectories]
        sampled = [pair for row in rows for pair in zip(row.source, row.weight_version, strict=True)]
        assert {version for source, version in sampled if source is Source.ON_POLICY} == {step - 1}
        for row in (row for group in groups for row in group.rollouts):
            if "}" in (text := decode(tokenizer, row.response_ids)):
                ended += 1
                assert text.endswith("}") and text.count("}") == 1 and row.finish_reason is FinishReason.STOP
                assert tokenizer.eos_token_id not in row.response_ids
    assert ended


@pytest.fixture
def sleeping(monkeypatch) -> list[str]:
    return sleeping_as_on_a_gpu(monkeypatch)


@pytest.fixture
def on_a_gpu(sleeping, monkeypatch) -> list[str]:
    """Stages see a GPU, on which their engines sleep; that memory is freed is noted in the list, too."""
    start = VLLMEngine.from_folder

    def started(*given, sleep_mode, **options) -> VLLMEngine:
        return start(*given, sleep_mode=True, **options)

    free = lambda: sleeping.append("free")  # noqa: E731
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1, empty_cache=free)
    monkeypatch.setattr(local, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(VLLMEngine, "from_folder", started)
    return sleeping


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


def test_a_killed_run_resumes_to_the_same_bits_with_an_engine_that_sleeps_while_the_trainer_learns(
    upstream, undisturbed, on_a_gpu, monkeypatch
):
    """Killed before the second update of step 3 and resumed from step 2, as on the trainer's GPU: step 3 is in the
    journal, steps 4 and 5 are generated by an engine that has generated nothing before."""
    learn = Learner.learn
    monkeypatch.setattr(Learner, "learn", lambda *given: (on_a_gpu.append("learn"), learn(*given))[1])
    monkeypatch.setattr(TrainerRank, "free_cache", lambda rank: on_a_gpu.append("free"))
    left = undisturbed.with_name("undisturbed-left")
    assert run_rl(CONFIG, left, upstream).resumed_from == 2
    # After the last step the validation wakes it once more.
    assert on_a_gpu == ["free"] + 3 * ["sleep 2", "learn", "free", "weights", "kv_cache"]
    assert_same_result(undisturbed, left)


def run_sft(out: Path, upstream: dict[str, Path], *overrides: str) -> Path:
    five_steps = ("sft.epochs=null", "sft.steps=5", "sft.batch_size=4")
    validated = "sft.validation={every: 2, suites: [longer, retention]}"
    config = experiment("sft", *OVERRIDES[:1], *five_steps, validated, *overrides)
    run_stage(config, "sft", out, upstream)
    return out


def validations_of(out: Path) -> list[dict[str, float]]:
    rows = read_metrics(out / "metrics.jsonl")
    return [{n: v for n, v in row.items() if n.startswith(("step", "val/"))} for row in rows if "val/accuracy" in row]


def test_vllm_validates_sft_as_the_embedded_engine_does(upstream, request, tmp_path):
    """As on a GPU: between validations the engine has no weights. `test_resume` has training without any."""
    embedded = run_sft(tmp_path / "embedded", upstream)
    on_a_gpu = request.getfixturevalue("on_a_gpu")
    by_vllm = run_sft(tmp_path / "vllm", upstream, "sft.engine=vllm")
    assert on_a_gpu == ["free", "sleep 2"] + 4 * ["free", "weights", "kv_cache", "sleep 2"]
    measured = validations_of(by_vllm)
    assert [(row["step"], row["val/weight_version"]) for row in measured] == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert measured == validations_of(embedded)
    tokens = {row["val/longer/mean_tokens"] + row["val/retention/mean_tokens"] for row in measured}
    assert len(tokens) > 1  # other weights
    assert cmp(embedded / "model/model.safetensors", by_vllm / "model/model.safetensors", shallow=False)

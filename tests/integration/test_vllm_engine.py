"""The vLLM engine, really run on CPU: one engine with a tied and one with an untied output head."""

import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.installed import needs_no_gpu, needs_vllm
from support.patience import PATIENCE_S, wait_until
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import VLLMConfig
from luffy.errors import ConfigError, LuffyError
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.training.ranks import init_process_group
from luffy.types import FinishReason

pytestmark = [pytest.mark.slow, needs_vllm, needs_no_gpu]
VOCABULARY = 23
CONTEXT = 512
STOP = 4
EOS = 9
"""The folder's own end of sequence, which stops nothing here."""
MAX_NUM_SEQS = 16
MAX_GAP = 1e-4
PROMPTS = ((1, 2, 3), (5,), (7, 8, 9, 10, 11, 12), (3, 3))
REQUESTS = [RolloutRequest(PROMPTS[i % len(PROMPTS)], seed=i) for i in range(24)]
PARAMS = {
    temperature: SamplingParams(temperature, max_response_tokens=20, stop_token_ids=(STOP,))
    for temperature in (0.0, 0.7, 1.0)
}


def model_of(
    seed: int, tied: bool = True, vocab_size: int = VOCABULARY, intermediate_size: int = 32
) -> PreTrainedModel:
    # Of vLLM's CPU attention 32 is the smallest head.
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=intermediate_size, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=CONTEXT, tie_word_embeddings=tied,
        initializer_range=0.2, eos_token_id=EOS,
    )  # fmt: skip
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.generation_config = GenerationConfig(eos_token_id=EOS, do_sample=True, top_k=1, repetition_penalty=2.0)
    model.save_pretrained(folder)
    return folder


@dataclass
class Started:
    """A running engine and what it said with the weights of its folder, by temperature."""

    engine: VLLMEngine
    tied: bool
    first: dict[float, list[Completion]]

    def model(self, seed: int) -> PreTrainedModel:
        return model_of(seed, self.tied)

    def load(self, seed: int) -> PreTrainedModel:
        """Give the engine the weights of `seed`, as their version."""
        model = self.model(seed)
        self.engine.load_weights(weights_of(model), version=seed)
        return model


def weights_of(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.data) for name, parameter in model.named_parameters())


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def started(request, tmp_path_factory) -> Iterator[Started]:
    folder = save(model_of(0, request.param), tmp_path_factory.mktemp("model"))
    config = VLLMConfig(cpu_kv_cache_gb=0.05, max_num_seqs=MAX_NUM_SEQS)
    if not request.param:
        init_process_group()
    had_group = dist.is_initialized()
    engine = VLLMEngine.from_folder(folder, config, "float32", wait_timeout_s=PATIENCE_S)
    yield Started(engine, request.param, {t: engine.generate(REQUESTS, params) for t, params in PARAMS.items()})
    engine.close()
    assert dist.is_initialized() is had_group, "vLLM ends its own process groups and no other"


one_engine = pytest.mark.parametrize("started", [True], ids=["tied"], indirect=True)
"""For what does not depend on the output head."""


def expected_logprobs(
    models: dict[int, PreTrainedModel], request: RolloutRequest, completion: Completion, temperature: float
) -> list[float]:
    """Each token's log-probability by a transformers model of its own version.

    A context keeps the KV cache that it was given by the weights of its time, as in the engine: the tokens behind an
    update are not those of a fresh forward pass, and are not asserted to be.
    """
    cache, logp = DynamicCache(config=models[completion.weight_versions[0]].config), []
    fed = [*request.prompt_ids, *request.prefix_ids]
    said = zip(completion.token_ids, completion.weight_versions, strict=True)
    for version, run in itertools.groupby(said, key=lambda pair: pair[1]):
        tokens = [token for token, _ in run]
        ids = torch.tensor([[*fed, *tokens[:-1]]])
        with torch.no_grad():
            logits_TV = models[version](input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -len(tokens) :]
        logp_TV = torch.log_softmax(logits_TV / (temperature or 1.0), dim=-1)
        logp += logp_TV[torch.arange(len(tokens)), tokens].tolist()
        fed = tokens[-1:]  # its keys and values are those of the next token's weights
    return logp


def largest_gap(
    models: dict[int, PreTrainedModel],
    requests: Sequence[RolloutRequest],
    completions: Sequence[Completion],
    temperature: float,
    expected: Callable[..., list[float]] = expected_logprobs,
) -> float:
    return max(
        abs(said - wanted)
        for request, completion in zip(requests, completions, strict=True)
        for said, wanted in zip(completion.logprobs, expected(models, request, completion, temperature), strict=True)
    )


@pytest.mark.parametrize("temperature", PARAMS)
def test_logprobs_equal_a_plain_forward_pass_before_and_after_an_update(started, temperature):
    assert largest_gap({0: started.model(0)}, REQUESTS, started.first[temperature], temperature) < MAX_GAP
    changed = started.load(seed=3)
    after = started.engine.generate(REQUESTS, PARAMS[temperature])
    assert started.engine.weight_version == 3
    assert largest_gap({3: changed}, REQUESTS, after, temperature) < MAX_GAP
    assert [c.token_ids for c in after] != [c.token_ids for c in started.first[temperature]]


@one_engine
def test_the_rest_of_the_process_may_compile(started):
    torch._dynamo.reset()  # an earlier engine's test has compiled the same lines
    function = torch.compile(lambda x: x + 1, backend="eager")
    before = counters["stats"]["unique_graphs"]
    assert function(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert counters["stats"]["unique_graphs"] > before


@one_engine
def test_whoever_watches_hears_of_each_response_and_token_while_a_call_runs(started):
    heard: list[tuple[int, int]] = []
    started.engine.watch = lambda finished, tokens: heard.append((finished, tokens))
    completions = started.engine.generate(REQUESTS, PARAMS[1.0])
    started.engine.watch = None
    finished, tokens = map(sum, zip(*heard, strict=True))
    assert (finished, tokens) == (len(REQUESTS), sum(len(each.token_ids) for each in completions))
    assert len(heard) > 3, "row by row, not call by call"


def test_greedy_tokens_equal_those_of_the_embedded_engine(started):
    expected = TransformersEngine(started.model(0), batch_size=64).generate(REQUESTS, PARAMS[0.0])
    assert [(c.token_ids, c.finish_reason) for c in started.first[0.0]] == [
        (c.token_ids, c.finish_reason) for c in expected
    ]
    for said, completion in zip(started.first[0.0], expected, strict=True):
        assert said.logprobs == pytest.approx(completion.logprobs, abs=MAX_GAP)


@one_engine
def test_a_request_samples_the_same_tokens_in_any_batch(started):
    """vLLM gives each request its own noise, but the logits under it change in their last bits with the batch: only a
    draw between two tokens that are equal to within those may differ, and none of these is."""
    started.load(seed=0)
    alone = [started.engine.generate([request], PARAMS[1.0])[0] for request in REQUESTS[:8]]
    backwards = started.engine.generate(REQUESTS[::-1], PARAMS[1.0])[::-1]
    tokens = [c.token_ids for c in started.first[1.0]]
    assert [c.token_ids for c in backwards] == tokens
    assert [c.token_ids for c in alone] == tokens[:8]
    assert len(set(tokens)) > 12


@one_engine
def test_a_row_ends_at_its_stop_token_or_at_the_limit_and_at_nothing_else(started):
    for completion in started.first[1.0]:
        assert STOP not in completion.token_ids[:-1]
        ended = completion.token_ids[-1] == STOP
        assert completion.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(completion.token_ids) == 20
    reasons = {completion.finish_reason for completion in started.first[1.0]}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert any(EOS in completion.token_ids[:-1] for completion in started.first[1.0])


@one_engine
def test_a_prefix_is_continued_within_the_limit_of_the_whole_response(started):
    model = started.load(seed=0)
    params = SamplingParams(1.0, max_response_tokens=20, stop_token_ids=())
    prefixes = [tuple(range(1, 1 + length)) for length in (0, 1, 5, 12, 18, 19)]
    requests = [RolloutRequest(PROMPTS[i % len(PROMPTS)], i, prefix) for i, prefix in enumerate(prefixes)]
    completions = started.engine.generate(requests, params)
    assert [len(completion.token_ids) for completion in completions] == [20, 19, 15, 8, 2, 1]
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    assert largest_gap({0: model}, requests, completions, 1.0) < MAX_GAP


@one_engine
def test_updates_fall_between_tokens_of_running_rows_of_several_threads(started):
    models = {seed: started.model(seed) for seed in range(40)}
    started.load(seed=0)
    # More rows than the engine holds at once: some begin behind the first updates.
    requests = [RolloutRequest(PROMPTS[i % len(PROMPTS)], seed=i) for i in range(24)]
    params, said = SamplingParams(1.0, max_response_tokens=120, stop_token_ids=()), {}

    def generate(half: int) -> None:
        said[half] = started.engine.generate(requests[half::2], params)

    threads = [threading.Thread(target=generate, args=(half,), daemon=True) for half in (0, 1)]
    for thread in threads:
        thread.start()
    wait_until(lambda: started.engine._running)
    for version in range(1, len(models)):
        if not any(thread.is_alive() for thread in threads):
            break
        started.engine.load_weights(weights_of(models[version]), version)
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    for half in (0, 1):
        versions = [completion.weight_versions for completion in said[half]]
        assert all(list(row) == sorted(row) and len(row) == 120 for row in versions)
        assert any(len(set(row)) > 1 for row in versions)
        assert largest_gap(models, requests[half::2], said[half], 1.0) < MAX_GAP


@one_engine
def test_the_kv_cache_of_old_weights_is_never_read_again(started):
    # Longer than vLLM's block of 128 tokens on CPU: shorter prompts are never cached.
    request = RolloutRequest(tuple(i % VOCABULARY for i in range(300)), seed=1)
    params = SamplingParams(1.0, max_response_tokens=4, stop_token_ids=())
    for seed in (5, 6):
        model = started.load(seed)
        completions = started.engine.generate([request, request], params)
        assert largest_gap({seed: model}, [request, request], completions, 1.0) < MAX_GAP


def test_weights_are_loaded_one_at_a_time(started):
    model, alive, most = started.model(0), [], 0

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, parameter in model.named_parameters():
            tensor = parameter.data.clone()
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            yield name, tensor
            del tensor

    started.engine.load_weights(weights(), version=0)
    # Weights and biases of q, k and v make one layer of vLLM's, which waits for the last of them. The seventh is the
    # embedding: of a vocabulary that vLLM pads (to a multiple of 64) it waits to the end.
    assert (most, len(alive)) == (7, 38 if started.tied else 39)


@one_engine
def test_unusable_requests_are_refused_in_one_line(started):
    long = [RolloutRequest((1,) * 500, seed=0), RolloutRequest((1,), seed=0)]
    with pytest.raises(ConfigError, match="1 of 2 prompts do not fit: the longest has 500 tokens"):
        started.engine.generate(long, PARAMS[1.0])
    with pytest.raises(ConfigError, match=r"temperature: 0\.001 is below"):
        started.engine.generate(REQUESTS, SamplingParams(0.001, 20, ()))


def test_head_sizes_without_vllm_cpu_attention_are_refused_before_the_start(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 96, "num_attention_heads": 4}))
    with pytest.raises(ConfigError, match="no attention of 24 dimensions a head on CPU, only of 32, 64, 80"):
        VLLMEngine.from_folder(tmp_path, VLLMConfig(), "float32")


@one_engine
def test_a_sleeping_engine_does_not_generate(started):
    # CPU engines free nothing, but stop and go on as those on GPUs.
    started.engine.sleep(level=1)
    with pytest.raises(AssertionError, match="wake the engine"):
        started.engine.generate(REQUESTS, PARAMS[1.0])
    started.engine.wake_up()
    assert len(started.engine.generate(REQUESTS, PARAMS[1.0])) == len(REQUESTS)


@one_engine
def test_an_update_pauses_generation_for_a_bounded_time(started):
    model, said = started.model(0), list[Completion]()
    waiting = threading.Thread(target=lambda: said.extend(started.engine.generate(REQUESTS, PARAMS[1.0])), daemon=True)
    with started.engine.weight_update(version=9) as update:
        started.engine._lock._timeout_s = 0.2
        with pytest.raises(LuffyError, match=r"busy for 0\.2 s"):
            started.engine.generate(REQUESTS, PARAMS[1.0])
        started.engine._lock._timeout_s = 60
        waiting.start()
        for name, tensor in weights_of(model):
            update.load(name, tensor)
    waiting.join(timeout=PATIENCE_S)
    assert {version for completion in said for version in completion.weight_versions} == {9}
    assert largest_gap({9: model}, REQUESTS, said, 1.0) < MAX_GAP


@one_engine
def test_turns_that_share_a_cache_agree_with_the_model_over_the_whole_conversation(started):
    model = started.load(seed=11)
    observation = (3, 17, 5)
    params = SamplingParams(1.0, max_response_tokens=120, stop_token_ids=(STOP,))
    prefixes: list[tuple[int, ...]] = [()] * len(REQUESTS)
    for turn in range(4):
        requests = [
            RolloutRequest(request.prompt_ids, 100 * turn + i, prefix, max_new_tokens=9, shares_cache_with="play 1")
            for i, (request, prefix) in enumerate(zip(REQUESTS, prefixes, strict=True))
        ]
        completions = started.engine.generate(requests, params)
        for request, completion in zip(requests, completions, strict=True):
            assert len(completion.token_ids) <= 9
            expected = expected_logprobs({11: model}, request, completion, 1.0)
            assert completion.logprobs == pytest.approx(expected, abs=MAX_GAP)
        prefixes = [
            request.prefix_ids + completion.token_ids + observation
            for request, completion in zip(requests, completions, strict=True)
        ]


def test_an_incomplete_update_is_an_error_and_ends_the_engine(started):
    """The last test of an engine: it cannot be used afterwards."""
    weights = [pair for pair in weights_of(started.model(1)) if pair[0] != "model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(LuffyError, match=r"weights were not sent: model.layers.1.mlp.down_proj.weight \(1 in all\)"):
        started.engine.load_weights(weights, version=1)
    with pytest.raises(LuffyError, match="cannot be used: an update of its weights failed"):
        started.engine.generate(REQUESTS, PARAMS[1.0])

"""vLLM really run on CPU: engines in this process, with a tied and an untied output head."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from support.installed import needs_no_gpu, needs_vllm
from support.patience import PATIENCE_S, wait_until
from support.refusals import refused
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel
from vllm_subjects import EOS, MAX_GAP, PARAMS, PROMPTS, REQUESTS, STOP, gap, model_of, save, weights_of

from luffy.config.execution import VLLMConfig
from luffy.errors import LuffyError
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.training.ranks import init_process_group
from luffy.types import FinishReason

pytestmark = needs_vllm
TIED = pytest.param("tied", marks=needs_no_gpu)
UNTIED = pytest.param("untied", marks=[needs_no_gpu, pytest.mark.slow])


@dataclass
class Subject:
    """A running engine, and what it said with the weights of its folder, by temperature."""

    engine: VLLMEngine
    model: Callable[[int], PreTrainedModel]

    def __post_init__(self) -> None:
        self.first = {temperature: self.engine.generate(REQUESTS, params) for temperature, params in PARAMS.items()}

    def load(self, seed: int, version: int | None = None) -> PreTrainedModel:
        """Give the engine the weights of `seed`, by default as their version."""
        self.engine.load_weights(weights_of(self.model(seed)), seed if version is None else version)
        return self.model(seed)


@pytest.fixture(scope="module", params=[TIED, UNTIED])
def subject(request, tmp_path_factory) -> Iterator[Subject]:
    tied = request.param == "tied"
    model = functools.cache(functools.partial(model_of, tied=tied))
    folder = save(model(0), tmp_path_factory.mktemp("model"))
    if not tied:
        init_process_group()
    had_group = dist.is_initialized()
    config = VLLMConfig(cpu_kv_cache_gb=0.05, max_num_seqs=16)
    engine = VLLMEngine.from_folder(folder, config, "float32", wait_timeout_s=PATIENCE_S)
    yield Subject(engine, model)
    engine.close()
    assert dist.is_initialized() is had_group, "vLLM ends its own process groups and no other"


tied_alone = pytest.mark.parametrize("subject", [TIED], indirect=True)
"""For what does not depend on the output head."""


def tokens_of(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def test_logprobs_equal_a_plain_forward_pass_before_and_after_an_update(subject):
    for temperature in PARAMS:
        said = subject.first[temperature]
        assert gap({0: subject.model(0)}, said, temperature=temperature) < MAX_GAP
    for version in (3, 0):
        model = subject.load(version)
        assert subject.engine.weight_version == version
        for temperature, params in PARAMS.items():
            completions = subject.engine.generate(REQUESTS, params)
            assert {v for completion in completions for v in completion.weight_versions} == {version}
            assert gap({version: model}, completions, temperature=temperature) < MAX_GAP
            is_as_before = tokens_of(completions) == tokens_of(subject.first[temperature])
            assert is_as_before is (version == 0), "weights and seed decide the draw"


def test_greedy_tokens_equal_those_of_the_embedded_engine(subject):
    expected = TransformersEngine(subject.model(0), batch_size=64).generate(REQUESTS, PARAMS[0.0])
    for said, completion in zip(subject.first[0.0], expected, strict=True):
        assert (said.token_ids, said.finish_reason) == (completion.token_ids, completion.finish_reason)
        assert said.logprobs == pytest.approx(completion.logprobs, abs=MAX_GAP)


@tied_alone
def test_updates_fall_between_tokens_of_running_rows(subject):
    models = {version: subject.model(version % 3) for version in range(60)}
    subject.load(0)
    params = SamplingParams(1.0, 240, stop_token_ids=())
    with ThreadPoolExecutor(2) as threads:
        parts = [REQUESTS[part::2] for part in range(2)]
        calls = [threads.submit(subject.engine.generate, part, params) for part in parts]

        def are_over() -> bool:
            return all(call.done() for call in calls)

        for version in range(1, len(models)):
            wait_until(lambda: subject.engine._running or are_over(), "a row that is being generated")
            if are_over():
                break
            subject.load(version % 3, version)
        for part, call in zip(parts, calls, strict=True):
            versions = [completion.weight_versions for completion in call.result(PATIENCE_S)]
            assert all(list(row) == sorted(row) and len(row) == 240 for row in versions)
            assert any(len(set(row)) > 1 for row in versions)
            assert gap(models, call.result(), part) < MAX_GAP


@tied_alone
def test_the_kv_cache_of_old_weights_is_never_read_again(subject):
    # Longer than vLLM's block of 128 tokens on CPU: shorter prompts are never cached.
    request = RolloutRequest(tuple(i % 12 for i in range(300)), seed=1)
    params = SamplingParams(1.0, max_response_tokens=4, stop_token_ids=())
    for seed in (5, 6):
        model = subject.load(seed)
        completions = subject.engine.generate([request, request], params)
        assert gap({seed: model}, completions, [request, request]) < MAX_GAP


@tied_alone
def test_the_rest_of_the_process_may_compile(subject):
    torch._dynamo.reset()  # an earlier engine's test has compiled the same lines
    function = torch.compile(lambda x: x + 1, backend="eager")
    before = counters["stats"]["unique_graphs"]
    assert function(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert counters["stats"]["unique_graphs"] > before


@tied_alone
def test_whoever_watches_hears_of_each_response_and_token_while_a_call_runs(subject):
    heard: list[tuple[int, int]] = []
    subject.engine.watch = lambda finished, tokens: heard.append((finished, tokens))
    completions = subject.engine.generate(REQUESTS, PARAMS[1.0])
    subject.engine.watch = None
    finished, tokens = map(sum, zip(*heard, strict=True))
    assert (finished, tokens) == (len(REQUESTS), sum(len(each.token_ids) for each in completions))
    assert len(heard) > 3, "row by row, not call by call"


@tied_alone
def test_a_request_samples_the_same_tokens_in_any_batch(subject):
    """vLLM gives each request its own noise, but the logits under it change in their last bits with the batch: only a
    draw between two tokens that are equal to within those may differ, and none of these is."""
    subject.load(seed=0)
    alone = [subject.engine.generate([request], PARAMS[1.0])[0] for request in REQUESTS[:8]]
    backwards = subject.engine.generate(REQUESTS[::-1], PARAMS[1.0])[::-1]
    tokens = [c.token_ids for c in subject.first[1.0]]
    assert [c.token_ids for c in backwards] == tokens
    assert [c.token_ids for c in alone] == tokens[:8]
    assert len(set(tokens)) > 12


@tied_alone
def test_a_row_ends_at_its_stop_token_or_at_the_limit_and_at_nothing_else(subject):
    for completion in subject.first[1.0]:
        assert STOP not in completion.token_ids[:-1]
        ended = completion.token_ids[-1] == STOP
        assert completion.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(completion.token_ids) == 20
    reasons = {completion.finish_reason for completion in subject.first[1.0]}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert any(EOS in completion.token_ids[:-1] for completion in subject.first[1.0])


@tied_alone
def test_a_prefix_is_continued_within_the_limit_of_the_whole_response(subject):
    model = subject.load(seed=0)
    params = SamplingParams(1.0, max_response_tokens=20, stop_token_ids=())
    prefixes = [tuple(range(1, 1 + length)) for length in (0, 1, 5, 12, 18, 19)]
    requests = [RolloutRequest(PROMPTS[i % len(PROMPTS)], i, prefix) for i, prefix in enumerate(prefixes)]
    completions = subject.engine.generate(requests, params)
    assert [len(completion.token_ids) for completion in completions] == [20, 19, 15, 8, 2, 1]
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    assert gap({0: model}, completions, requests) < MAX_GAP


def test_weights_are_loaded_one_at_a_time(subject):
    model, alive, most = subject.model(0), [], 0

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, parameter in model.named_parameters():
            tensor = parameter.data.clone()
            alive.append(weakref.ref(tensor))
            most = max(most, sum(reference() is not None for reference in alive))
            yield name, tensor
            del tensor

    subject.engine.load_weights(weights(), version=0)
    # Weights and biases of q, k and v make one layer of vLLM's, which waits for the last of them. The seventh is the
    # embedding: of a vocabulary that vLLM pads (to a multiple of 64) it waits to the end.
    assert (most, len(alive)) == (7, 38 if model.config.tie_word_embeddings else 39)


@tied_alone
def test_unusable_requests_are_refused_in_one_line(subject):
    long = [RolloutRequest((1,) * 500, seed=0), RolloutRequest((1,), seed=0)]
    with refused("1 of 2", "500"):
        subject.engine.generate(long, PARAMS[1.0])
    with refused("temperature", "0.001"):
        subject.engine.generate(REQUESTS, SamplingParams(0.001, 20, ()))


@tied_alone
def test_a_sleeping_engine_does_not_generate(subject):
    # CPU engines free nothing, but stop and go on as those on GPUs.
    subject.engine.sleep()
    with pytest.raises(AssertionError, match="wake the engine"):
        subject.engine.generate(REQUESTS, PARAMS[1.0])
    subject.engine.wake_up("weights")
    subject.engine.wake_up("kv_cache")
    assert len(subject.engine.generate(REQUESTS, PARAMS[1.0])) == len(REQUESTS)


@tied_alone
def test_an_update_pauses_generation_for_a_bounded_time(subject):
    model, said = subject.model(0), list[Completion]()
    waiting = threading.Thread(target=lambda: said.extend(subject.engine.generate(REQUESTS, PARAMS[1.0])), daemon=True)
    with subject.engine.weight_update(version=9) as update:
        subject.engine._lock._timeout_s = 0.2
        with pytest.raises(LuffyError, match=r"busy for 0\.2 s"):
            subject.engine.generate(REQUESTS, PARAMS[1.0])
        subject.engine._lock._timeout_s = 60
        waiting.start()
        for name, tensor in weights_of(model):
            update.load(name, tensor)
    waiting.join(timeout=PATIENCE_S)
    assert {version for completion in said for version in completion.weight_versions} == {9}
    assert gap({9: model}, said) < MAX_GAP


@tied_alone
def test_turns_that_share_a_cache_agree_with_the_model_over_the_whole_conversation(subject):
    model = subject.load(seed=11)
    observation = (3, 17, 5)
    params = SamplingParams(1.0, max_response_tokens=120, stop_token_ids=(STOP,))
    prefixes: list[tuple[int, ...]] = [()] * len(REQUESTS)
    for turn in range(4):
        requests = [
            RolloutRequest(request.prompt_ids, 100 * turn + i, prefix, max_new_tokens=9, shares_cache_with="play 1")
            for i, (request, prefix) in enumerate(zip(REQUESTS, prefixes, strict=True))
        ]
        completions = subject.engine.generate(requests, params)
        assert max(len(completion.token_ids) for completion in completions) <= 9
        assert gap({11: model}, completions, requests) < MAX_GAP
        prefixes = [
            request.prefix_ids + completion.token_ids + observation
            for request, completion in zip(requests, completions, strict=True)
        ]


def test_an_incomplete_update_is_an_error_and_ends_the_engine(subject):
    """The last test of an engine: it cannot be used afterwards."""
    weights = [pair for pair in weights_of(subject.model(1)) if pair[0] != "model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(LuffyError, match=r"weights were not sent: model.layers.1.mlp.down_proj.weight \(1 in all\)"):
        subject.engine.load_weights(weights, version=1)
    with pytest.raises(LuffyError, match="cannot be used: an update of its weights failed"):
        subject.engine.generate(REQUESTS, PARAMS[1.0])

"""The embedded engine: what it samples, alone and in batches, and its cache beside transformers' own."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.attention_case import CONFIGS, model_of
from reference.gradient_case import VOCABULARY, tiny_model
from reference.rows import evaluate
from synthetic.arithmetic import tiny_tokenizer
from synthetic.trajectories import row_of
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from luffy.rollout import transformers_engine
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import RoomyLayer, TransformersEngine, roomy_cache
from luffy.types import FinishReason

STOP = 4
PROMPTS = ((1, 2, 3), (5,), (7, 8, 9, 10, 11, 12), (3, 3))


def _requests(count: int = 24) -> list[RolloutRequest]:
    return [RolloutRequest(PROMPTS[i % len(PROMPTS)], seed=i) for i in range(count)]


def _params(temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(temperature, max_response_tokens=20, stop_token_ids=(STOP,))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(temperature: float) -> None:
    model = tiny_model().eval()
    requests = _requests(8)
    completions = TransformersEngine(model, batch_size=64).generate(requests, _params(temperature))
    scaled = tiny_model().eval()
    scaled.lm_head.weight.data /= temperature
    for request, completion in zip(requests, completions, strict=True):
        row = row_of(ids=completion.token_ids, prompt_ids=request.prompt_ids)
        assert evaluate(scaled, row)[0].tolist() == pytest.approx(completion.logprobs, abs=1e-5)


def test_greedy_equals_transformers_own_generate() -> None:
    model = tiny_model().eval()
    (completion,) = TransformersEngine(model, 4).generate([RolloutRequest((1, 2, 3), seed=0)], _params(0.0))
    expected = model.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=20, do_sample=False, eos_token_id=STOP, pad_token_id=0
    )
    assert list(completion.token_ids) == expected[0, 3:].tolist()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.5)])
def test_draws_and_their_log_probabilities_are_those_of_the_likeliest_tokens(temperature: float, top_p: float) -> None:
    model = tiny_model().eval()
    requests = [RolloutRequest((1, 2, 3), seed=i) for i in range(4000)]
    params = SamplingParams(temperature, max_response_tokens=1, stop_token_ids=(), top_p=top_p)
    completions = TransformersEngine(model, 4000).generate(requests, params)
    logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1].detach()
    probability = torch.softmax(logits.double() / temperature, dim=-1)
    order = probability.argsort(descending=True)
    size = VOCABULARY if top_p == 1.0 else int((probability[order].cumsum(0) < top_p).sum()) + 1
    allowed = {int(token): float(probability[token] / probability[order[:size]].sum()) for token in order[:size]}
    drawn = [completion.token_ids[0] for completion in completions]
    assert set(drawn) <= set(allowed) and size > 1
    for token, share in allowed.items():
        assert drawn.count(token) / 4000 == pytest.approx(share, abs=4.5 * (share * (1 - share) / 4000) ** 0.5 + 1e-9)
    for completion in completions[:50]:
        assert completion.logprobs[0] == pytest.approx(math.log(allowed[completion.token_ids[0]]), abs=1e-5)


def test_a_token_of_a_large_vocabulary_is_the_one_whose_interval_holds_the_uniform_number() -> None:
    model = Qwen2ForCausalLM(Qwen2Config(**{**CONFIGS["qwen2"].to_dict(), "vocab_size": 700})).eval()
    requests, params = [RolloutRequest((1, 2, 3), seed=i) for i in range(2000)], SamplingParams(0.5, 1, ())
    drawn = [one.token_ids[0] for one in TransformersEngine(model, 2000).generate(requests, params)]
    upto = torch.softmax(model(torch.tensor([[1, 2, 3]])).logits[0, -1].double() / 0.5, dim=-1).cumsum(0)
    numbers = [
        float(torch.rand(1, generator=torch.Generator().manual_seed(i), dtype=torch.float64)) for i in range(2000)
    ]
    expected = torch.searchsorted(upto, torch.tensor(numbers, dtype=torch.float64)).tolist()
    assert sum(token != other for token, other in zip(drawn, expected, strict=True)) <= 1  # rounded to float32


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_of_model_decodes_as_its_own_forward_pass_does(kind: str) -> None:
    """With padding and shared heads; three kinds without calling that pass again after the prompts."""
    model, passes, read = model_of(kind).eval(), [], []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: read.append(tuple(given[0].shape)))
    requests = _requests(12)
    completions = TransformersEngine(model, 12).generate(requests, SamplingParams(0.7, 20, (STOP,)))
    assert read[0] == (len(PROMPTS), max(map(len, PROMPTS)))  # prompts that rows share are read once
    steps = max(len(completion.token_ids) for completion in completions)
    assert len(passes) == (1 if kind in ("llama", "qwen2", "qwen3") else steps) < len(read) + 1 == steps + 1
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor(request.prompt_ids + completion.token_ids)
        logp_TV = torch.log_softmax(model(ids[None]).logits[0].detach() / 0.7, dim=-1)[len(request.prompt_ids) - 1 : -1]
        expected = logp_TV.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
        assert expected.tolist() == pytest.approx(completion.logprobs, abs=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_a_cpu_multiplies_by_packed_copies_of_the_weights_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen2").eval()
    linears, seen = [module for module in model.modules() if isinstance(module, torch.nn.Linear)], []
    model.register_forward_pre_hook(lambda *_: seen.append(["forward" in vars(linear) for linear in linears]))
    for _ in range(2):
        monkeypatch.setattr(transformers_engine, "_LARGE", 2**16)
        plain = TransformersEngine(model, 8).generate(_requests(8), _params())
        monkeypatch.setattr(transformers_engine, "_LARGE", 1)
        packed = TransformersEngine(model, 8).generate(_requests(8), _params())
        for one, other in zip(packed, plain, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        for linear in linears:
            assert "forward" not in vars(linear)
            linear.weight.data *= 1.1
    assert seen == [[False] * len(linears), [True] * len(linears)] * 2


def test_a_request_may_have_a_lower_limit_of_its_own_and_a_longer_context_leaves_more_room_for_the_same_draws() -> None:
    engine, endless = TransformersEngine(tiny_model().eval(), 4), dataclasses.replace(_params(), stop_token_ids=())
    requests = [dataclasses.replace(request, max_new_tokens=1 + i) for i, request in enumerate(_requests(8))]
    completions = engine.generate(requests, endless)
    assert [len(completion.token_ids) for completion in completions] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    usual, longer = (RolloutRequest((1, 2, 3), seed=5, response_in_prompt=given) for given in (0, -4))
    (first,), (second,) = engine.generate([usual], endless), engine.generate([longer], endless)
    assert len(second.token_ids) == 24
    assert second.token_ids[:20] == first.token_ids


def test_a_prefix_is_continued_and_not_returned() -> None:
    engine = TransformersEngine(tiny_model().eval(), 4)
    params = SamplingParams(1.0, max_response_tokens=20, stop_token_ids=())
    (whole,) = engine.generate([RolloutRequest((1, 2, 3, 9, 9), seed=5)], params)
    (split,) = engine.generate([RolloutRequest((1, 2, 3), seed=5, prefix_ids=(9, 9))], params)
    assert split.token_ids == whole.token_ids[:18]
    assert split.logprobs == pytest.approx(whole.logprobs[:18], abs=1e-5)


@pytest.mark.parametrize("stops", [(), (STOP,)])
def test_the_limit_is_that_of_the_whole_response_and_draws_do_not_depend_on_the_batch(stops: tuple[int, ...]) -> None:
    model = tiny_model().eval()
    prefixes = [(8,) * length for length in (0, 1, 5, 12, 18, 19)]
    requests = [RolloutRequest(PROMPTS[i % len(PROMPTS)], i, prefix) for i, prefix in enumerate(prefixes)]
    params = SamplingParams(1.0, max_response_tokens=20, stop_token_ids=stops)
    # A top-p that excludes nothing changes no draw either.
    alone, *others = (
        TransformersEngine(model, batch_size).generate(requests + _requests(18), dataclasses.replace(params, top_p=p))
        for batch_size, p in ((1, 1.0), (64, 1.0), (3, 1.0), (64, 1 - 1e-12))
    )
    drawn = [completion.token_ids for completion in alone]
    assert [[completion.token_ids for completion in other] for other in others] == [drawn] * 3
    for completion, most in zip(alone, [20, 19, 15, 8, 2, 1, *[20] * 18], strict=True):
        has_stopped = completion.token_ids[-1] in stops
        assert not set(completion.token_ids[:-1]) & set(stops)
        assert completion.finish_reason is (FinishReason.STOP if has_stopped else FinishReason.LENGTH)
        assert has_stopped or len(completion.token_ids) == most
        assert len(completion.logprobs) == len(completion.token_ids)
    assert any(completion.finish_reason is FinishReason.STOP for completion in alone) == bool(stops)


def test_a_stop_text_ends_the_rows_that_say_it_and_no_others(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    model = tiny_model().eval()
    # The ids of this model are bytes and pairs of bytes to the tokenizer: any text that some row says will do.
    plain = TransformersEngine(model, 64).generate(_requests(), _params())
    texts = [tokenizer.decode(completion.token_ids) for completion in plain]
    stop = texts[0][6:9]
    params = dataclasses.replace(_params(), stop=(stop,))
    stopped = TransformersEngine(model, 64, tokenizer_folder=tmp_path).generate(_requests(), params)
    assert stop in tokenizer.decode(stopped[0].token_ids)
    assert stop not in tokenizer.decode(stopped[0].token_ids[:-1])
    for before, after, text in zip(plain, stopped, texts, strict=True):
        assert before.token_ids[: len(after.token_ids)] == after.token_ids
        assert (after.finish_reason is FinishReason.STOP) >= (stop in text)
        assert after == before or stop in text
    without = TransformersEngine(model, 64).generate(_requests(), params)
    assert [completion.token_ids for completion in without] == [completion.token_ids for completion in plain]


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 90), st.lists(st.integers(0, 3), max_size=4, unique=True)), min_size=1, max_size=6
    )
)
def test_it_holds_what_concatenation_holds(steps: list[tuple[int, list[int]]]) -> None:
    """Each step adds some tokens, and may then keep only some rows."""
    plain, roomy, rows = DynamicLayer(), RoomyLayer(), 4
    generator = torch.Generator().manual_seed(0)
    for tokens, kept in steps:
        keys, values = torch.randn(2, rows, 2, tokens, 3, generator=generator)
        for found, expected in zip(roomy.update(keys, values), plain.update(keys, values), strict=True):
            assert torch.equal(found, expected)
        kept = [row for row in kept if row < rows]
        if kept:
            rows = len(kept)
            for layer in (plain, roomy):
                layer.batch_select_indices(torch.tensor(kept))
        assert roomy.get_seq_length() == plain.get_seq_length() and roomy.keys.shape == plain.keys.shape


def test_most_steps_write_in_place() -> None:
    layer, places = RoomyLayer(), set()
    for _ in range(130):
        places.add(layer.update(*torch.ones(2, 1, 1, 1, 2))[0].data_ptr())
    assert len(places) == 2


def test_windowed_layers_keep_their_own_cache() -> None:
    kinds = [type(layer) for layer in roomy_cache(CONFIGS["qwen2, half windowed"]).layers]
    assert kinds == [RoomyLayer, DynamicSlidingWindowLayer]
    assert isinstance(roomy_cache(CONFIGS["llama"]), DynamicCache)

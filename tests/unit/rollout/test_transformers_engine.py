"""The embedded engine: what it samples, alone and in batches, its cache beside transformers' own, and stop texts."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.attention_case import CONFIGS, model_of
from reference.gradient_case import tiny_model
from synthetic.arithmetic import tiny_tokenizer
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from luffy.rollout import transformers_engine
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams, StopTexts
from luffy.rollout.transformers_engine import RoomyLayer, TransformersEngine, roomy_cache
from luffy.types import FinishReason

STOP = 4
PROMPTS = ((1, 2, 3), (5,), (7, 8, 9, 10, 11, 12), (3, 3))


def _requests(count=24):
    return [RolloutRequest(PROMPTS[i % len(PROMPTS)], seed=i) for i in range(count)]


def _params(temperature=1.0):
    return SamplingParams(temperature, max_response_tokens=20, stop_token_ids=(STOP,))


def test_greedy_equals_transformers_own_generate():
    model = tiny_model().eval()
    (completion,) = TransformersEngine(model, 4).generate([RolloutRequest((1, 2, 3), seed=0)], _params(0.0))
    expected = model.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=20, do_sample=False, eos_token_id=STOP, pad_token_id=0
    )
    assert list(completion.token_ids) == expected[0, 3:].tolist()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (0.7, 0.5)])
def test_a_token_is_that_of_the_likeliest_whose_interval_holds_the_uniform_number(temperature, top_p):
    """Among 700 tokens, which are more than a block."""
    model = Qwen2ForCausalLM(Qwen2Config(**{**CONFIGS["qwen2"].to_dict(), "vocab_size": 700})).eval()
    requests = [RolloutRequest((1, 2, 3), seed=i) for i in range(2000)]
    params = SamplingParams(temperature, max_response_tokens=1, stop_token_ids=(), top_p=top_p)
    completions = TransformersEngine(model, 2000).generate(requests, params)
    logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1].detach()
    probability = torch.softmax(logits.double() / temperature, dim=-1)
    order = probability.argsort(descending=True)
    allowed = order if top_p == 1.0 else order[: int((probability[order].cumsum(0) < top_p).sum()) + 1]
    share = torch.zeros_like(probability).index_put((allowed,), probability[allowed] / probability[allowed].sum())
    numbers = [torch.rand(1, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2000)]
    expected = torch.searchsorted(share.cumsum(0), torch.cat(numbers)).tolist()
    drawn = [completion.token_ids[0] for completion in completions]
    assert sum(token != other for token, other in zip(drawn, expected, strict=True)) <= 1  # rounded to float32
    assert len(allowed) > 1 and set(drawn) <= set(allowed.tolist())
    for completion in completions[:50]:
        assert completion.logprobs[0] == pytest.approx(math.log(share[completion.token_ids[0]]), abs=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_of_model_decodes_as_its_own_forward_pass_does(kind):
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
def test_a_cpu_multiplies_by_packed_copies_of_the_weights_as_they_are_now(monkeypatch):
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


def test_a_request_may_have_a_lower_limit_of_its_own_and_a_longer_context_leaves_more_room_for_the_same_draws():
    engine, endless = TransformersEngine(tiny_model().eval(), 4), dataclasses.replace(_params(), stop_token_ids=())
    requests = [dataclasses.replace(request, max_new_tokens=1 + i) for i, request in enumerate(_requests(8))]
    completions = engine.generate(requests, endless)
    assert [len(completion.token_ids) for completion in completions] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {completion.finish_reason for completion in completions} == {FinishReason.LENGTH}
    usual, longer = (RolloutRequest((1, 2, 3), seed=5, response_in_prompt=given) for given in (0, -4))
    (first,), (second,) = engine.generate([usual], endless), engine.generate([longer], endless)
    assert len(second.token_ids) == 24
    assert second.token_ids[:20] == first.token_ids


def test_a_prefix_is_continued_and_not_returned():
    engine = TransformersEngine(tiny_model().eval(), 4)
    params = SamplingParams(1.0, max_response_tokens=20, stop_token_ids=())
    (whole,) = engine.generate([RolloutRequest((1, 2, 3, 9, 9), seed=5)], params)
    (split,) = engine.generate([RolloutRequest((1, 2, 3), seed=5, prefix_ids=(9, 9))], params)
    assert split.token_ids == whole.token_ids[:18]
    assert split.logprobs == pytest.approx(whole.logprobs[:18], abs=1e-5)


@pytest.mark.parametrize("stops", [(), (STOP,)])
def test_the_limit_is_that_of_the_whole_response_and_draws_do_not_depend_on_the_batch(stops):
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


def test_a_stop_text_ends_the_rows_that_say_it_and_no_others(tmp_path):
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


KEPT = st.lists(st.integers(0, 3), max_size=4, unique=True)


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.tuples(st.integers(1, 90), KEPT), min_size=1, max_size=6))
def test_it_holds_what_concatenation_holds(steps):
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


def test_most_steps_write_in_place_and_windowed_layers_keep_their_own_cache():
    layer, places = RoomyLayer(), set()
    for _ in range(130):
        places.add(layer.update(*torch.ones(2, 1, 1, 1, 2))[0].data_ptr())
    assert len(places) == 2
    kinds = [type(layer) for layer in roomy_cache(CONFIGS["qwen2, half windowed"]).layers]
    assert kinds == [RoomyLayer, DynamicSlidingWindowLayer]
    assert isinstance(roomy_cache(CONFIGS["llama"]), DynamicCache)


PIECES = ("a", "b", "</", "answer", ">", ">b", "</answer>", "é")
"""The text of each token."""
ENDING = "</answer>"


def decode(ids):
    return "".join(PIECES[i] for i in ids)


def completion_of(ids):
    return Completion(ids, tuple(-0.1 * i for i in range(len(ids))), FinishReason.LENGTH, tuple(range(len(ids))))


STOPS = StopTexts((ENDING,), decode)
IDS = st.lists(st.sampled_from(range(len(PIECES))), max_size=12).map(tuple)


def test_the_text_ends_with_the_stop_text_and_the_tokens_with_the_one_that_completes_it():
    ids = (0, 2, 3, 5, 0)  # a </ answer >b a
    assert STOPS.read(ids) == ("a</answer>", 4)
    assert STOPS.text(ids) == STOPS.text(ids[:4]) == "a</answer>"
    assert STOPS.text(ids[:3]) == "a</answer"
    cut = STOPS.cut(completion_of(ids))
    assert cut == Completion(ids[:4], (0.0, -0.1, -0.2, pytest.approx(-0.3)), FinishReason.STOP, (0, 1, 2, 3))
    without = completion_of((0, 2, 3, 0))
    assert STOPS.cut(without) is without
    assert StopTexts((), decode).cut(completion_of((6,))).token_ids == (6,)
    # A prefix ends before the token that completes a stop text.
    for ids, kept in {(0, 6, 1): 1, (0, 2, 3, 4): 3, (0, 1): 2, (6,): 0}.items():
        assert STOPS.before_first(ids) == kept


@given(given_ids=IDS, ids=IDS.filter(bool))
def test_what_is_kept_holds_a_stop_text_and_one_token_less_does_not(given_ids, ids):
    given_ids = given_ids[: STOPS.before_first(given_ids)]
    cut = STOPS.cut(completion_of(ids), given_ids)
    assert ENDING not in decode(given_ids + cut.token_ids[:-1])
    assert cut.token_ids == ids[: len(cut.token_ids)]
    assert (cut.finish_reason is FinishReason.STOP) == (ENDING in decode(given_ids + cut.token_ids))
    assert cut.finish_reason is FinishReason.STOP or cut.token_ids == ids

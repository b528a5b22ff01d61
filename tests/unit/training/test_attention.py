"""Attention and the output head in training: sequences never meet, nothing is square in the tokens, what cannot work is
refused; the head equals log_softmax written out in float64, also where a token is certain."""

import copy
import functools
import inspect
import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.attention_case import (
    CONFIGS,
    LENGTHS,
    batch_of,
    gradients_alone,
    model_of,
    recurrent_model,
    rows_of,
    varlen_attention,
)
from reference.gradient_case import OPTIMIZER, execution, relative_l2
from reference.rows import evaluate
from reference.value_case import config as critic_config
from support.installed import needs_compiler
from support.refusals import refused
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from luffy.config.execution import ExecutionConfig
from luffy.config.training import SFTConfig
from luffy.errors import DataError
from luffy.objectives.schedules import StepObjective, objective_at
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training import attention
from luffy.training.attention import attend_by_sequence, attention_inputs, set_attention
from luffy.training.critic import Critic
from luffy.training.fused_head import Entropy, LogProbHead
from luffy.training.policy import FrozenPolicy, Policy
from luffy.training.policy_model import PolicyModel
from luffy.types import TrainBatch

PACKED = {"packing": True, "micro_batch_tokens": 10_000}
PADDED = {"micro_batch_tokens": 10_000}


def imitation(width: int = 1) -> StepObjective:
    return objective_at(SFTConfig(epochs=1, batch_size=1, optimizer=OPTIMIZER).objective.terms, 1, 1, width)


def gradients_of(model: PreTrainedModel, rows: TrainBatch, layout: Mapping[str, object]) -> dict[str, Tensor]:
    policy = Policy(copy.deepcopy(model), OPTIMIZER, execution(**layout), "float32")
    policy.accumulate(rows, imitation())
    return {name: safe_get_full_grad(parameter) for name, parameter in policy.causal_lm.named_parameters()}


@functools.cache
def scorers(kind: str) -> tuple[FrozenPolicy, ...]:
    return tuple(FrozenPolicy(model_of(kind), execution(**layout), 1.0) for layout in (PACKED, PADDED))


@functools.cache
def written_out(kind: str) -> PreTrainedModel:
    """transformers' own implementation with every mask and score, in float64."""
    return model_of(kind, "eager").double().eval()


@pytest.mark.parametrize("kind", CONFIGS)
@settings(deadline=None, max_examples=10)
@given(lengths=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 25)), min_size=1, max_size=7))
def test_log_probabilities_are_those_of_each_sequence_alone(kind: str, lengths: Sequence[tuple[int, int]]) -> None:
    rows = rows_of(lengths)
    batch = batch_of(rows)
    assert written_out(kind).config._attn_implementation == "eager"
    with torch.no_grad():
        expected = torch.cat([evaluate(written_out(kind), row)[0] for row in rows])
    for scorer in scorers(kind):
        assert torch.allclose(scorer.logprobs(batch)[batch.response_mask_BT].double(), expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral"])
def test_gradients_are_those_of_each_sequence_alone(kind: str) -> None:
    rows = rows_of(LENGTHS)
    expected = gradients_alone(kind, rows)
    for layout in (PACKED, PADDED):
        assert relative_l2(gradients_of(model_of(kind), batch_of(rows), layout), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_packed_equals_padded_at_8192_tokens(kind: str) -> None:
    batch = batch_of(rows_of([(48, 2952), (16, 2032), (100, 1700), (30, 970), (4, 340)]))
    assert batch.attention_mask_BT.sum() == 8192
    packed, padded = (gradients_of(model_of(kind), batch, layout) for layout in (PACKED, PADDED))
    assert relative_l2(packed, padded) < 1e-5


@pytest.mark.parametrize("window", [None, 700, 60])
def test_a_window_is_the_same_in_blocks(window: int | None) -> None:
    torch.manual_seed(1)
    bounds = (0, 1300, 1305, 1945)
    query, key, value = (torch.randn(1, heads, 1945, 8, dtype=torch.float64) for heads in (4, 2, 2))
    how = {"scaling": 0.3, "sliding_window": window, "sequence_bounds": torch.tensor(bounds)}
    found, _ = attend_by_sequence(torch.nn.Identity(), query, key, value, None, **how)
    flat = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    assert torch.allclose(found[0], varlen_attention(*flat, bounds[1:-1], 0.3, window))


class Squares(TorchDispatchMode):
    """Collects tensors that have a number of tokens twice in their shape."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.shape.count(self._tokens) > 1:
                self.found.append(f"{func}: {tuple(tensor.shape)}")
        return result


def test_a_square_mask_would_be_found() -> None:
    with Squares(37) as squares, torch.no_grad():
        model_of("qwen2")(torch.ones(2, 37, dtype=torch.long), attention_mask=torch.arange(74).view(2, 37) < 60)
    assert any("(2, 1, 37, 37)" in found for found in squares.found)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "mistral"])
@pytest.mark.parametrize("layout", [PACKED, PADDED], ids=["packed", "padded"])
def test_nothing_is_square_in_the_tokens_of_a_row(layout, kind, monkeypatch):
    monkeypatch.setattr(attention, "_BLOCK", 16)
    batch = batch_of(rows_of([(30, 71), (20, 20), (1, 9)]))
    policy = Policy(model_of(kind), OPTIMIZER, execution(**layout), "float32")
    critic = Critic(model_of(kind), critic_config(0.2), execution(**layout), "float32")
    with Squares(151 if layout is PACKED else 101) as squares:
        policy.accumulate(batch, imitation())
        policy.logprobs(batch)
        critic.accumulate(batch)
    assert squares.found == []


def peak_bytes(policy: PolicyModel, rows: int) -> int:
    """Of a forward and a backward pass over that many packed rows of 128 tokens."""
    positions_1T = torch.arange(128).repeat(rows).unsqueeze(0)
    ids_1T, response_1T = positions_1T % 23, positions_1T > 0
    tracker = MemTracker()
    with tracker:
        bounds = attention_inputs(positions_1T, ExecutionConfig(packing=True))
        policy(ids_1T, positions_1T, response_1T, bounds, entropy="none")[0].sum().backward()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_memory_grows_with_the_packed_tokens_and_no_faster(kind: str) -> None:
    policy = PolicyModel(model_of(kind), 1.0, 64)
    set_attention(policy.causal_lm, ExecutionConfig(packing=True))
    peak_bytes(policy, 4)  # gradients of the parameters exist from here on
    peaks = [peak_bytes(policy, rows) for rows in (4, 8, 16, 32)]
    steps = [(after - before) / rows for before, after, rows in zip(peaks, peaks[1:], (4, 8, 16), strict=False)]
    assert max(steps) < 1.05 * min(steps)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_sequences_of_a_packed_row_attend_in_one_call_where_torch_has_the_kernel(kind, monkeypatch):
    """It is for GPUs; attention written out in torch takes its place, and gradients flow through it.

    There rows are packed by default."""

    def varlen(query, key, value, starts, starts_k, longest, longest_k, *, scale, window_size, enable_gqa):
        inspect.signature(varlen_attn).bind(
            query, key, value, starts, starts, longest, longest, scale=scale, window_size=window_size, enable_gqa=True
        )
        assert starts is starts_k and starts.dtype is torch.int32 and window_size[1] == 0 and enable_gqa
        assert longest == longest_k == int(starts.diff().max())
        window = None if window_size[0] == -1 else window_size[0] + 1
        return varlen_attention(query, key, value, starts[1:-1], scale, window)

    batch = batch_of(rows_of(LENGTHS))
    expected = gradients_of(model_of(kind), batch, PADDED)
    with monkeypatch.context() as patched:
        patched.setattr(attention, "has_packed_kernel", lambda query, value: True)
        patched.setattr(attention, "varlen_attn", varlen)
        patched.setattr(attention, "_attend", None)
        assert relative_l2(gradients_of(model_of(kind), batch, PADDED | {"packing": None}), expected) < 1e-5


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_the_policy_generates_as_if_it_were_not_in_training(kind: str) -> None:
    requests = [RolloutRequest(tuple(range(1, 1 + length)), seed=length) for length in (3, 11, 6)]
    params = SamplingParams(1.0, 9, ())
    policy = Policy(model_of(kind), OPTIMIZER, execution(**PACKED), "float32")
    with policy.inference_model() as whole:
        found = TransformersEngine(whole, 3).generate(requests, params)
    assert found == TransformersEngine(model_of(kind).eval(), 3).generate(requests, params)
    batch = batch_of(rows_of(LENGTHS))
    assert torch.allclose(policy.logprobs(batch), scorers(kind)[1].logprobs(batch), atol=2e-5)


def test_a_recurrent_model_is_padded_and_not_packed_also_if_its_configuration_does_not_say_so(monkeypatch):
    with refused("packing: true", "FalconH1ForCausalLM"):
        set_attention(recurrent_model(), execution(packing=True))
    assert set_attention(recurrent_model(), ExecutionConfig()).packing is False
    monkeypatch.setattr(attention, "_attends_plainly", lambda model: True)
    with refused("FalconH1ForCausalLM", "packing: false", error=DataError):
        set_attention(recurrent_model(), ExecutionConfig(packing=True))
    monkeypatch.setattr(attention, "_has_one_call", lambda model: True)
    assert set_attention(recurrent_model(), ExecutionConfig()).packing is False


def test_a_model_that_attends_in_chunks_keeps_its_masks_and_capped_scores_are_refused() -> None:
    model = model_of("llama")
    model.config.attention_chunk_size = 8
    with refused("packing: true", "LlamaForCausalLM"):
        set_attention(model, execution(packing=True))
    set_attention(model, ExecutionConfig())
    assert model.config._attn_implementation == "sdpa"
    query = torch.zeros(1, 2, 3, 4)
    with refused("caps its attention scores", error=DataError):
        attend_by_sequence(torch.nn.Identity(), query, query, query, None, scaling=1.0, softcap=50.0)


# ---- the output head ----

TOKENS, HIDDEN, VOCABULARY = 50, 16, 300
TARGET_N = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))


def layer(bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, VOCABULARY, bias=bias)


def reference(linear: nn.Linear, hidden_NH: Tensor, temperatures: tuple[float, ...], entropy: Entropy) -> list[Tensor]:
    found = []
    for temperature in temperatures:
        logp_NV = (linear(hidden_NH) / temperature).log_softmax(dim=-1)
        found.append(logp_NV.gather(-1, TARGET_N.unsqueeze(-1)).squeeze(-1))
        if entropy != "none":
            entropy_N = -(logp_NV.exp() * logp_NV).sum(dim=-1)
            found.append(entropy_N if entropy == "gradient" else entropy_N.detach())
    return found


def hidden_states() -> tuple[Tensor, Tensor]:
    hidden_NH = 4 * torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))
    return hidden_NH.requires_grad_(), hidden_NH.detach().double().requires_grad_()


def assert_same_gradients(found: Sequence[Tensor], expected: Sequence[Tensor], *pairs: tuple[Tensor, Tensor]) -> None:
    """Of all scores, each with a weight of its own at each token, by both tensors of each pair."""
    weights = torch.randn(len(expected), TOKENS, generator=torch.Generator().manual_seed(3))
    (torch.stack(list(found)) * weights).sum().backward()
    (torch.stack(list(expected)) * weights.double()).sum().backward()
    for own, other in pairs:
        assert own.grad is not None and other.grad is not None
        assert (own.grad.double() - other.grad).norm() < 1e-5 * other.grad.norm()


def both(head: LogProbHead, linear64: nn.Linear) -> list[tuple[Tensor, Tensor]]:
    return list(zip(head.linear.parameters(), linear64.parameters(), strict=True))


@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
@pytest.mark.parametrize("untempered", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_scores_and_gradients_equal_float64(entropy: Entropy, untempered: bool, bias: bool) -> None:
    """In chunks of 16 tokens, the last of which is shorter; each score with a weight of its own for each token."""
    head, linear64 = LogProbHead(layer(bias), 0.7, 16), layer(bias).double()
    hidden_NH, hidden64_NH = hidden_states()
    found = head(hidden_NH, TARGET_N, entropy, untempered)
    expected = reference(linear64, hidden64_NH, (0.7, 1.0)[: 1 + untempered], entropy)
    for score_N, expected_N in zip(found, expected, strict=True):
        assert torch.allclose(score_N.double(), expected_N, rtol=1e-5, atol=1e-5)
    assert_same_gradients(found, expected, (hidden_NH, hidden64_NH), *both(head, linear64))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("tokens", [17, 1, 0])  # in chunks of 16: the last of one token, or none
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_passes_compute_the_same(dtype: torch.dtype, tokens: int) -> None:
    found = []
    for compiled in (True, False):
        head = LogProbHead(layer().to(dtype), 0.7, 16)
        head.is_compiled = compiled
        generator = torch.Generator().manual_seed(2)
        hidden_NH = (4 * torch.randn(tokens, HIDDEN, generator=generator)).to(dtype).requires_grad_()
        scores = head(hidden_NH, TARGET_N[:tokens], "gradient", untempered=True)
        torch.stack(scores).sum().backward()
        found.append([*scores, hidden_NH.grad, head.linear.weight.grad])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_an_almost_certain_token_keeps_its_digits(dtype: torch.dtype) -> None:
    """1 - p, here 5e-5, is below the rounding of p in bfloat16: the gradient is rounded after the difference."""
    linear = nn.Linear(2, 2, bias=False).to(dtype)
    linear.weight = nn.Parameter(torch.tensor([[10.0, 0.0], [0.0, 0.0]], dtype=dtype))
    hidden_NH = torch.tensor([[1.0, 0.0]], dtype=dtype, requires_grad=True)
    (logp_N,) = LogProbHead(linear, 1.0, 16)(hidden_NH, torch.tensor([0]), "none")
    logp_N.sum().backward()
    assert hidden_NH.grad is not None
    assert float(hidden_NH.grad[0, 0]) == pytest.approx(10 / (1 + math.exp(10)), rel=1e-2)


def test_no_tokens_have_no_scores_and_a_gradient_of_zero() -> None:
    head, hidden_NH = LogProbHead(layer(), 1.0, 16), torch.zeros(0, HIDDEN, requires_grad=True)
    logp_N, entropy_N = head(hidden_NH, TARGET_N[:0], "gradient")
    assert logp_N.shape == entropy_N.shape == (0,)
    (logp_N.sum() + entropy_N.sum()).backward()
    assert head.linear.weight.grad is not None and not head.linear.weight.grad.any()


@pytest.mark.parametrize("count", [1, 7, VOCABULARY])
@pytest.mark.parametrize("entropy", ["none", "gradient"])
def test_choices_and_all_other_tokens_equal_float64(count: int, entropy: Entropy) -> None:
    """Beside the scores of the tokens themselves; the target is among the choices of some tokens."""
    head, linear64 = LogProbHead(layer(True), 0.7, 16), layer(True).double()
    hidden_NH, hidden64_NH = hidden_states()
    logq_NV = (linear64(hidden64_NH.detach()) / 0.7).log_softmax(dim=-1)
    target_logp_N, entropy_N, *most_N = head.most_probable(hidden_NH.detach(), TARGET_N, count, True, None)
    assert torch.allclose(entropy_N.double(), -(logq_NV.exp() * logq_NV).sum(-1), rtol=1e-5, atol=1e-5)
    logq_NC, choice_NC = torch.stack(most_N[: count + 1], dim=-1), torch.stack(most_N[count + 1 :], dim=-1).long()
    assert torch.equal(choice_NC.sort().values, logq_NV.topk(count).indices.sort().values)

    def chosen(logp_NV: Tensor) -> Tensor:
        others_NV = logp_NV.scatter(-1, choice_NC, -math.inf)
        rest_N1 = others_NV.logsumexp(-1, keepdim=True) if count < VOCABULARY else logp_NV.new_full((TOKENS, 1), -80.0)
        return torch.cat([logp_NV.gather(-1, choice_NC), rest_N1], dim=-1)

    scores = head(hidden_NH, TARGET_N, entropy, choice_NC=choice_NC)
    found, expected = scores[-(count + 1) :], chosen((linear64(hidden64_NH) / 0.7).log_softmax(dim=-1)).unbind(-1)
    for name, one, other in (("policy", found, expected), ("teacher", logq_NC.unbind(-1), chosen(logq_NV).unbind(-1))):
        assert torch.allclose(torch.stack(one).double(), torch.stack(other), rtol=1e-5, atol=1e-5), name
    assert torch.allclose(target_logp_N, scores[0], rtol=1e-5, atol=1e-5)
    own = reference(linear64, hidden64_NH, (0.7,), entropy)
    assert_same_gradients(scores, [*own, *expected], (hidden_NH, hidden64_NH), *both(head, linear64))


def test_a_teacher_with_more_tokens_chooses_among_those_of_the_policy() -> None:
    """The probability of its own further tokens is among that of all others."""
    head, hidden_NH = LogProbHead(layer(), 1.0, 16), torch.randn(TOKENS, HIDDEN)
    head.vocabulary = 5
    _, _, *found = head.most_probable(hidden_NH, TARGET_N, 64, False, None)
    logp_NC, choice_NC = torch.stack(found[:6], dim=-1), torch.stack(found[6:], dim=-1).long()
    expected_NV = head.linear(hidden_NH).log_softmax(-1)
    assert choice_NC.sort().values.tolist() == [[0, 1, 2, 3, 4]] * TOKENS
    assert torch.allclose(logp_NC[:, :5], expected_NV.gather(-1, choice_NC), atol=1e-5)
    assert torch.allclose(logp_NC[:, 5], expected_NV[:, 5:].logsumexp(-1), atol=1e-5)


def test_the_probability_of_all_other_tokens_keeps_its_digits() -> None:
    """1e-12 of it, which 1 - sum of the choices could not tell from 0; its gradient is that of two tokens alike."""
    linear = nn.Linear(1, 3, bias=False)
    linear.weight = nn.Parameter(torch.tensor([[1.0], [-27.0], [-27.0]]))
    hidden_NH = torch.ones(1, 1)
    *_, first, rest = LogProbHead(linear, 1.0, 16)(hidden_NH, torch.tensor([0]), "none", choice_NC=torch.tensor([[0]]))
    assert rest.item() == pytest.approx(math.log(2) - 28, rel=1e-6) and first.item() == pytest.approx(0, abs=1e-6)
    (gradient,) = torch.autograd.grad(rest.sum(), linear.weight)
    assert gradient.flatten().tolist() == pytest.approx([-1.0, 0.5, 0.5], rel=1e-5)

"""The output head equals log_softmax written out in float64, values and gradients, also where a token is certain."""

import math
from collections.abc import Sequence

import pytest
import torch
from support.installed import needs_compiler
from torch import Tensor, nn

from luffy.training.fused_head import Entropy, LogProbHead

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


def assert_same_gradients(
    head: LogProbHead,
    linear64: nn.Linear,
    found: Sequence[Tensor],
    expected: Sequence[Tensor],
    hidden_NH: Tensor,
    hidden64_NH: Tensor,
) -> None:
    """Of all scores, each with a weight of its own at each token."""
    weights = torch.randn(len(expected), TOKENS, generator=torch.Generator().manual_seed(3))
    (torch.stack(list(found)) * weights).sum().backward()
    (torch.stack(list(expected)) * weights.double()).sum().backward()
    pairs = [(hidden_NH, hidden64_NH), *zip(head.linear.parameters(), linear64.parameters(), strict=True)]
    for own, other in pairs:
        assert own.grad is not None and other.grad is not None
        assert (own.grad.double() - other.grad).norm() < 1e-5 * other.grad.norm()


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
    assert_same_gradients(head, linear64, found, expected, hidden_NH, hidden64_NH)


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
    assert_same_gradients(head, linear64, scores, [*own, *expected], hidden_NH, hidden64_NH)


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

"""Auxiliary losses against their formulas: likelihood of demonstrations, entropy, divergences."""

import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import formulas
from reference.token_cases import Tokens, assert_same, evaluate, packed, sequences, term, tokens

from luffy.config.terms import (
    DistillationLoss,
    DivergenceLoss,
    EntropyLoss,
    KLLoss,
    LossConfig,
    NegativeLogLikelihoodLoss,
    TokenWeight,
)
from luffy.objectives.losses import token_loss
from luffy.objectives.objective import logp_gradients

LOG = math.log
WEIGHTS: tuple[TokenWeight, ...] = get_args(TokenWeight)


@pytest.mark.parametrize("weight", WEIGHTS)
@given(cases=st.lists(sequences(), min_size=1, max_size=3))
def test_nll_weighs_each_sequence_of_a_packed_row_by_its_own_entropy(weight: TokenWeight, cases: list[Tokens]) -> None:
    alone = [formulas.nll(case.logp_T, case.entropy_T, weight) for case in cases]
    found = evaluate(NegativeLogLikelihoodLoss(kind="nll", token_weight=weight), *cases)
    assert_same(found, tuple(np.concatenate(column) for column in zip(*alone, strict=True)))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("one", [1.0, 1.0]),
        ("probability", [0.5, 0.1]),
        ("p_one_minus_p", [0.25, 0.09]),
        ("trust_region", [1.0, 1.0]),
        ("exp_entropy", [3.0, 3.0]),  # the mean of log 1 and log 9 is log 3
        ("exp_minus_entropy", [1 / 3, 1 / 3]),
    ],
)
def test_nll_weights_by_hand(weight: TokenWeight, expected: list[float]) -> None:
    case = tokens([LOG(0.5), LOG(0.1)], entropy=[0.0, LOG(9.0)])
    loss, gradient = evaluate(NegativeLogLikelihoodLoss(kind="nll", token_weight=weight), case)
    assert gradient.tolist() == pytest.approx([-w for w in expected])
    assert loss.tolist() == pytest.approx([-expected[0] * LOG(0.5), -expected[1] * LOG(0.1)])


@pytest.mark.parametrize("weight", WEIGHTS)
def test_nll_weights_have_no_gradient_through_the_entropy(weight: TokenWeight) -> None:
    batch = packed([tokens([LOG(0.5), LOG(0.1)], entropy=[0.5, 1.5])])
    loss_BT = token_loss(NegativeLogLikelihoodLoss(kind="nll", token_weight=weight), batch).loss_BT
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), batch.entropy_BT, allow_unused=True)
    assert gradient_BT is None or not gradient_BT.any()


@given(sequences())
def test_entropy(case: Tokens) -> None:
    batch = packed([case])
    loss_BT = token_loss(EntropyLoss(kind="entropy"), batch).loss_BT
    (gradient_BT,) = torch.autograd.grad(loss_BT.sum(), batch.entropy_BT)
    assert_same((loss_BT.detach().numpy()[0], gradient_BT.numpy()[0]), (-case.entropy_T, -np.ones(len(case))))


@pytest.mark.parametrize("weight", ["exp_entropy", "probability"])
@pytest.mark.parametrize("temperature", ["one", "rollout"])
def test_a_loss_at_temperature_one_sees_nothing_of_the_sampled_distribution(temperature: str, weight: str) -> None:
    """Neither in its value nor in the factor on grad log pi_theta that metrics report."""
    sampled, plain = (tokens([LOG(p), LOG(0.1)], entropy=[LOG(p + 1), 2 * p]) for p in (0.5, 0.3))
    batch, other = packed([sampled]), packed([plain])
    batch = replace(batch, untempered_logp_BT=other.logp_BT, untempered_entropy_BT=other.entropy_BT)
    seen = plain if temperature == "one" else sampled
    nll = NegativeLogLikelihoodLoss(kind="nll", token_weight=weight, temperature=temperature)
    loss, gradient = evaluate(nll, seen)
    (found_BT,) = logp_gradients((term(nll, "response"),), batch, torch.ones(1, 1, 2))
    assert_same((token_loss(nll, batch).loss_BT.detach().numpy()[0], found_BT.numpy()[0]), (loss, gradient))
    entropy_BT = token_loss(EntropyLoss(kind="entropy", temperature=temperature), batch).loss_BT
    assert entropy_BT[0].tolist() == [*-seen.entropy_T]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("against", ["reference", "old", "behavior", "teacher"])
@given(case=sequences())
def test_kl(estimator: str, against: str, case: Tokens) -> None:
    found = evaluate(KLLoss(kind="kl", estimator=estimator, against=against), case)
    others = {"reference": case.logp_ref_T, "old": case.logp_old_T, "behavior": case.logp_mu_T}
    other_T = others.get(against, case.logp_ref_T)  # the teacher of a case is its reference
    assert_same(found, formulas.kl(case.logp_T, other_T, estimator))


@given(case=sequences(unknown=True))
def test_distillation(case: Tokens) -> None:
    """The teacher of a case is its reference; an unknown sampler is the policy before the step's updates."""
    logp_mu_T = np.where(np.isnan(case.logp_mu_T), case.logp_old_T, case.logp_mu_T)
    found = evaluate(DistillationLoss(kind="distillation"), case)
    assert_same(found, formulas.distillation(case.logp_T, logp_mu_T, case.logp_ref_T))


MEASURES = ("forward_kl", "reverse_kl", "jsd")


def _divergence(measure: str, logp_V: torch.Tensor, logq_V: torch.Tensor, top_k: int, rest: str = "bucket") -> float:
    """Over the teacher's `top_k` most probable tokens, of which there may be all."""
    chosen = logq_V.topk(top_k).indices

    def coarse(logp_V: torch.Tensor) -> torch.Tensor:
        others_V = logp_V.index_fill(0, chosen, -torch.inf)
        return torch.cat([logp_V[chosen], others_V.logsumexp(0, keepdim=True).clamp(min=-80.0)]).view(1, 1, -1)

    settings = {"beta": 0.3} if measure == "jsd" else {}
    config = DivergenceLoss(kind="divergence", measure=measure, top_k=top_k, rest=rest, **settings)
    batch = replace(packed([tokens([-1.0])]), logp_BTC=coarse(logp_V), logq_BTC=coarse(logq_V))
    return token_loss(config, batch).loss_BT.item()


def _over_vocabulary(measure: str, logp_V: torch.Tensor, logq_V: torch.Tensor) -> float:
    p, q = logp_V.exp(), logq_V.exp()
    m = 0.3 * q + 0.7 * p
    return {
        "forward_kl": (q * (q / p).log()).sum(),
        "reverse_kl": (p * (p / q).log()).sum(),
        "jsd": 0.3 * (q * (q / m).log()).sum() + 0.7 * (p * (p / m).log()).sum(),
    }[measure].item()


@pytest.mark.parametrize("measure", MEASURES)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.1, 1.0, 5.0]))
def test_a_divergence_over_few_tokens_bounds_the_whole_from_below_and_meets_it(measure, seed, spread) -> None:
    generator = torch.Generator().manual_seed(seed)
    logp_V, logq_V = (spread * torch.randn(2, 9, generator=generator, dtype=torch.float64)).log_softmax(-1)
    whole = _over_vocabulary(measure, logp_V, logq_V)
    found = [_divergence(measure, logp_V, logq_V, top_k) for top_k in range(1, 10)]
    assert found[-1] == pytest.approx(whole, abs=1e-6)
    # Each further token parts one that was counted with the others.
    assert all(0 <= few <= more + 1e-12 for few, more in itertools.pairwise([0.0, *found, whole + 1e-9]))


def test_the_ignored_rest_is_left_out_and_the_sum_may_be_negative() -> None:
    logp_V, logq_V = torch.tensor([[0.5, 0.4, 0.1], [0.4, 0.3, 0.3]], dtype=torch.float64).log()
    expected = 0.4 * LOG(0.4 / 0.5) + 0.3 * LOG(0.3 / 0.4)
    assert _divergence("forward_kl", logp_V, logq_V, 2, "ignored") == pytest.approx(expected)
    assert expected < 0 < _divergence("forward_kl", logp_V, logq_V, 2)


def test_kl_by_hand() -> None:
    case = tokens([LOG(0.2)], ref=[LOG(0.4)])  # q / p = 2
    expected = {"k1": (-LOG(2), 1.0), "k2": (LOG(2) ** 2 / 2, -LOG(2)), "k3": (1 - LOG(2), -1.0)}
    for estimator, (value, gradient) in expected.items():
        found = evaluate(KLLoss(kind="kl", estimator=estimator), case)
        assert_same(found, (np.array([value]), np.array([gradient])))


def _expected_gradient(config: LossConfig, logits_V: torch.Tensor, logq_V: torch.Tensor) -> torch.Tensor:
    """Of the loss in expectation over tokens sampled from the policy, the sample itself held fixed."""
    logits_V = logits_V.clone().requires_grad_()
    logp_V = logits_V.log_softmax(-1)
    batch = packed([tokens(logp_V.tolist(), ref=logq_V.tolist())])
    loss_BT = token_loss(config, batch).loss_BT
    (by_logp_BT,) = torch.autograd.grad(loss_BT.sum(), batch.logp_BT)
    (gradient_V,) = torch.autograd.grad((logp_V.exp().detach() * by_logp_BT[0] * logp_V).sum(), logits_V)
    return gradient_V


def test_expected_gradients_are_what_the_config_says() -> None:
    """k2 and distillation: the reverse divergence KL(p || q); k3: the forward one, KL(q || p); k1: nothing."""
    generator = torch.Generator().manual_seed(3)
    logits_V = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    logq_V = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    logp_V = logits_V.log_softmax(-1)
    (reverse_V,) = torch.autograd.grad((logp_V.exp() * (logp_V - logq_V)).sum(), logits_V, retain_graph=True)
    (forward_V,) = torch.autograd.grad((logq_V.exp() * (logq_V - logp_V)).sum(), logits_V)
    losses = {name: KLLoss(kind="kl", estimator=name) for name in ("k1", "k2", "k3")}
    losses["distillation"] = DistillationLoss(kind="distillation")
    expected = {"k1": 0 * reverse_V, "k2": reverse_V, "k3": forward_V, "distillation": reverse_V}
    for name, expected_V in expected.items():
        found_V = _expected_gradient(losses[name], logits_V.detach(), logq_V)
        torch.testing.assert_close(found_V, expected_V, rtol=1e-9, atol=1e-12)

"""Policy shaping against its closed form (LUFFY, arXiv 2504.14945, eq. 6-7)."""

import pytest
import torch

from luffy.config.terms import IdentityShaping, RationalShaping, ShapedSurrogateLoss
from luffy.objectives.losses import TokenBatch, shape, token_loss

# p -> p * f'(p) for f(x) = x / (x + 0.1), rounded as published.
PUBLISHED = {0.001: 0.0098, 0.01: 0.0826, 0.05: 0.2222, 0.1: 0.25, 0.5: 0.1389, 0.99: 0.0833}


def _tokens(logp: torch.Tensor, advantage: float, logp_behavior: float = float("nan")) -> TokenBatch:
    full = torch.ones_like(logp.detach())
    return TokenBatch(
        logp_BT=logp,
        entropy_BT=full,
        untempered_logp_BT=logp,
        untempered_entropy_BT=full,
        logp_old_BT=full,
        logp_behavior_BT=full * logp_behavior,
        logp_ref_BT=full,
        logp_teacher_BT=full,
        advantage_BT=full * advantage,
        sequence_BT=full.long(),
        selected_BT=full.bool(),
    )


def _gradient_coefficient(p: float, shaping: RationalShaping | IdentityShaping, teacher: float = float("nan")) -> float:
    """The coefficient on grad log pi: minus the derivative of the loss by logp, at advantage 1."""
    logp = torch.tensor([[p]], dtype=torch.float64).log().requires_grad_()
    loss = ShapedSurrogateLoss(kind="shaped_surrogate", shaping=shaping, behavior="recorded")
    token_loss(loss, _tokens(logp, 1.0, teacher)).sum().backward()
    return -float(logp.grad)


@pytest.mark.parametrize(("p", "expected"), PUBLISHED.items())
def test_gradient_coefficient_is_the_published_table(p: float, expected: float) -> None:
    found = _gradient_coefficient(p, RationalShaping(kind="rational"))
    assert found == pytest.approx(expected, abs=6e-5)
    assert found == pytest.approx(p * 0.1 / (p + 0.1) ** 2, rel=1e-12)


@pytest.mark.parametrize("gamma", [0.05, 0.1, 0.3, 0.5])
def test_peak_is_a_quarter_at_p_equal_gamma(gamma: float) -> None:
    shaping = RationalShaping(kind="rational", gamma=gamma)
    assert _gradient_coefficient(gamma, shaping) == pytest.approx(0.25, rel=1e-12)
    assert _gradient_coefficient(gamma * 1.5, shaping) < 0.25
    assert _gradient_coefficient(gamma / 1.5, shaping) < 0.25


def test_identity_weighs_a_token_by_its_probability() -> None:
    assert _gradient_coefficient(0.3, IdentityShaping(kind="identity")) == pytest.approx(0.3, rel=1e-12)


def test_teacher_logprobs_enter_the_shaped_ratio() -> None:
    p, teacher = 0.02, 0.4
    rho = p / teacher
    found = _gradient_coefficient(p, RationalShaping(kind="rational"), torch.tensor(teacher).double().log().item())
    assert found == pytest.approx(rho * 0.1 / (rho + 0.1) ** 2, rel=1e-6)


def test_shaping_survives_extreme_ratios() -> None:
    log_rho = torch.tensor([-800.0, 0.0, 800.0], dtype=torch.float64)
    values = shape(RationalShaping(kind="rational"), log_rho)
    assert values.tolist() == pytest.approx([0.0, 1 / 1.1, 1.0])

"""Policy shaping: what becomes of the off-policy importance ratio (LUFFY, arXiv 2504.14945, eq. 6 and 7).

Each function takes `log_rho = log(pi_theta / pi_phi)` of any shape and returns `f(rho)` of the same shape. With
surrogate -A f(rho), the coefficient on grad log pi_theta is `A rho f'(rho)`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from luffy.config.objective import (
    IdentityShaping,
    LinearLogShaping,
    LogShaping,
    PowerShaping,
    RationalShaping,
    ShapingConfig,
)
from luffy.objectives.ratios import bounded_exp


def rational(log_rho: Tensor, config: RationalShaping) -> Tensor:
    """f(x) = x / (x + gamma); the gradient coefficient x gamma / (x + gamma)^2 peaks with 1/4 at x = gamma.

    Written as sigmoid(log x - log gamma), which neither overflows for large ratios nor underflows for small ones.
    """
    return torch.sigmoid(log_rho - math.log(config.gamma))


def identity(log_rho: Tensor, config: IdentityShaping) -> Tensor:
    """f(x) = x."""
    return bounded_exp(log_rho)


def log(log_rho: Tensor, config: LogShaping) -> Tensor:
    """f(x) = log x."""
    return log_rho


def power(log_rho: Tensor, config: PowerShaping) -> Tensor:
    """f(x) = x^exponent."""
    return bounded_exp(config.exponent * log_rho)


def linear_log(log_rho: Tensor, config: LinearLogShaping) -> Tensor:
    """f(x) = x + weight log x."""
    return bounded_exp(log_rho) + config.weight * log_rho


_SHAPINGS: dict[str, Callable[[Tensor, ShapingConfig], Tensor]] = {
    "rational": rational,  # type: ignore[dict-item]
    "identity": identity,  # type: ignore[dict-item]
    "log": log,  # type: ignore[dict-item]
    "power": power,  # type: ignore[dict-item]
    "linear_log": linear_log,  # type: ignore[dict-item]
}


def shape(log_rho: Tensor, config: ShapingConfig) -> Tensor:
    """f(rho) for the configured shaping."""
    return _SHAPINGS[config.kind](log_rho, config)

"""Policy shaping: transforms of the off-policy importance ratio (LUFFY, arXiv 2504.14945, eq. 6 and 7).

Each function takes `log_rho = log(pi_theta / pi_phi)` of any shape and returns `f(rho)` of the same shape. With
surrogate -A f(rho), the coefficient on grad log pi_theta is `A rho f'(rho)`.
"""

import math
from functools import singledispatch

import torch
from torch import Tensor

from luffy.config.terms import (
    IdentityShaping,
    LinearLogShaping,
    LogShaping,
    PowerShaping,
    RationalShaping,
    ShapingConfig,
)
from luffy.objectives.ratios import bounded_exp


@singledispatch
def shape(config: ShapingConfig, log_rho: Tensor) -> Tensor:
    """f(rho) for the configured shaping."""
    raise NotImplementedError(f"no shaping for {type(config).__name__}")


@shape.register
def rational(config: RationalShaping, log_rho: Tensor) -> Tensor:
    """f(x) = x / (x + gamma); the gradient coefficient x gamma / (x + gamma)^2 peaks with 1/4 at x = gamma.

    Written as sigmoid(log x - log gamma), which neither overflows for large ratios nor underflows for small ones.
    """
    return torch.sigmoid(log_rho - math.log(config.gamma))


@shape.register
def identity(config: IdentityShaping, log_rho: Tensor) -> Tensor:
    """f(x) = x."""
    return bounded_exp(log_rho)


@shape.register
def log(config: LogShaping, log_rho: Tensor) -> Tensor:
    """f(x) = log x."""
    return log_rho


@shape.register
def power(config: PowerShaping, log_rho: Tensor) -> Tensor:
    """f(x) = x^exponent."""
    return bounded_exp(config.exponent * log_rho)


@shape.register
def linear_log(config: LinearLogShaping, log_rho: Tensor) -> Tensor:
    """f(x) = x + weight log x."""
    return bounded_exp(log_rho) + config.weight * log_rho

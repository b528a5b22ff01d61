"""Policy shaping: what becomes of the off-policy importance ratio (LUFFY, arXiv 2504.14945, eq. 6 and 7).

Each function takes `log_rho = log(pi_theta / pi_phi)` of any shape and returns `f(rho)` of the same shape. With
surrogate -A f(rho), the coefficient on grad log pi_theta is `A rho f'(rho)`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from luffy.config.objective import IdentityShaping, RationalShaping, ShapingConfig


def rational(log_rho: Tensor, config: RationalShaping) -> Tensor:
    """f(x) = x / (x + gamma); the gradient coefficient x gamma / (x + gamma)^2 peaks with 1/4 at x = gamma.

    Written as sigmoid(log x - log gamma), which neither overflows for large ratios nor underflows for small ones.
    """
    return torch.sigmoid(log_rho - torch.log(torch.as_tensor(config.gamma, dtype=log_rho.dtype)))


def identity(log_rho: Tensor, config: IdentityShaping) -> Tensor:
    """f(x) = x."""
    return torch.exp(log_rho)


_SHAPINGS: dict[str, Callable[[Tensor, ShapingConfig], Tensor]] = {
    "rational": rational,  # type: ignore[dict-item]
    "identity": identity,  # type: ignore[dict-item]
}


def shape(log_rho: Tensor, config: ShapingConfig) -> Tensor:
    """f(rho) for the configured shaping."""
    return _SHAPINGS[config.kind](log_rho, config)

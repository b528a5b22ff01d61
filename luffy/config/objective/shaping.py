"""Policy shaping: which function of the off-policy importance ratio is maximised (LUFFY, arXiv 2504.14945, eq. 6)."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from luffy.config.strict import StrictModel

_INFINITY = float("inf")


class RationalShaping(StrictModel):
    """f(x) = x / (x + gamma), LUFFY eq. 6."""

    kind: Literal["rational"]
    gamma: PositiveFloat = 0.1

    codomain: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def formula(self) -> str:
        return f"rho / (rho + {self.gamma:g})"


class IdentityShaping(StrictModel):
    """f(x) = x: the bare importance ratio."""

    kind: Literal["identity"]

    codomain: ClassVar[tuple[float, float]] = (0.0, _INFINITY)

    def formula(self) -> str:
        return "rho"


class LogShaping(StrictModel):
    """f(x) = log x: advantage-weighted supervised learning, every token with the same weight."""

    kind: Literal["log"]

    codomain: ClassVar[tuple[float, float]] = (-_INFINITY, _INFINITY)

    def formula(self) -> str:
        return "log rho"


class PowerShaping(StrictModel):
    """f(x) = x^exponent; 0.5 is the square root."""

    kind: Literal["power"]
    exponent: PositiveFloat = 0.5

    codomain: ClassVar[tuple[float, float]] = (0.0, _INFINITY)

    def formula(self) -> str:
        return f"rho^{self.exponent:g}"


class LinearLogShaping(StrictModel):
    """f(x) = x + weight log x: `p_logp` of the authors' code."""

    kind: Literal["linear_log"]
    weight: PositiveFloat = 0.1

    codomain: ClassVar[tuple[float, float]] = (-_INFINITY, _INFINITY)

    def formula(self) -> str:
        return f"(rho + {self.weight:g} log rho)"


ShapingConfig = Annotated[
    RationalShaping | IdentityShaping | LogShaping | PowerShaping | LinearLogShaping, Field(discriminator="kind")
]

"""The objective at one step: its terms, and the values of their coefficients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from luffy.config.objective import AdaptiveValue, TermConfig
from luffy.objectives.schedules import value_at


@dataclass(frozen=True, slots=True)
class StepObjective:
    """What one optimizer step minimises."""

    terms: tuple[TermConfig, ...]
    coefficients: tuple[float, ...]
    """One for each term."""
    max_response_tokens: int
    """Divisor of `mode: constant` (Dr.GRPO)."""


def objective_at(
    terms: Sequence[TermConfig],
    step: int,
    total_steps: int,
    max_response_tokens: int,
    adaptive: Mapping[str, float] | None = None,
) -> StepObjective:
    """The objective at `step` (from 1) of `total_steps`.

    Args:
        adaptive: present values of the adaptive coefficients by the names of their terms
            (`luffy.objectives.schedules.AdaptiveCoefficients`).
    """
    coefficients = []
    for term in terms:
        if isinstance(term.coefficient, AdaptiveValue):
            coefficients.append((adaptive or {}).get(term.name, term.coefficient.start))
        else:
            coefficients.append(value_at(term.coefficient, step, total_steps))
    return StepObjective(tuple(terms), tuple(coefficients), max_response_tokens)

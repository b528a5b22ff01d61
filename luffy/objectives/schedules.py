"""Values scheduled over the steps of a stage: pure functions of the step, so that a resumed run gets the same ones.

`objective_at` gives the terms of a step with their coefficients.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from luffy.config.terms import ConstantValue, CosineValue, LinearValue, ScheduledValue, TermConfig, WarmupCosineValue
from luffy.config.training import ScheduleConfig


def schedule_multiplier(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Multiplier of the learning rate for optimizer step `step` (counted from 0) of `total_steps`.

    Warm-up climbs linearly and reaches 1 with its last step; `linear` and `cosine` then fall to `final_share` at the
    last step of the stage.
    """
    warmup_steps = math.ceil(round(config.warmup_share * total_steps, 6))  # 0.07 x 100 is 7, not 7.000000000000001
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1)
    if config.kind == "constant":
        return 1.0
    fall = progress if config.kind == "linear" else _half_cosine(progress)
    return 1.0 - (1.0 - config.final_share) * fall


def value_at(value: ScheduledValue, step: int, total_steps: int) -> float:
    """The value at `step` (counted from 1) of `total_steps`; the first step is progress 0, the last progress 1."""
    progress = (step - 1) / max(total_steps - 1, 1)
    match value:
        case ConstantValue():
            return value.value
        case LinearValue(start=start, end=end, levels=levels):
            done = min(progress / value.over, 1.0)
            if levels is not None:
                # The first level is `start`, the last is reached with the last of `levels` equal windows.
                level = math.floor(round(done * levels, 6))  # 2 / 25 / 0.8 x 10 is 1, not 0.9999999999999999
                done = min(level, levels - 1) / (levels - 1)
            return start + (end - start) * done
        case CosineValue(start=start, end=end):
            return start + (end - start) * _half_cosine(min(progress / value.over, 1.0))
        case WarmupCosineValue(start=start, peak=peak, end=end, warmup=warmup):
            if progress < warmup:
                return start + (peak - start) * progress / warmup
            return peak + (end - peak) * _half_cosine(min((progress - warmup) / value.decay, 1.0))


def _half_cosine(progress: float) -> float:
    """From 0 to 1 along half a cosine."""
    return 0.5 * (1.0 - math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class StepObjective:
    """What one optimizer step minimises."""

    terms: tuple[TermConfig, ...]
    coefficients: tuple[float, ...]
    """One for each term."""
    max_response_tokens: int
    """Divisor of `mode: constant` (Dr.GRPO)."""
    teachers: tuple[str, ...] = ()
    """Names of `rl.teachers`, in order: `gate.taught` goes by them."""


def objective_at(
    terms: Sequence[TermConfig], step: int, total_steps: int, max_response_tokens: int, teachers: Iterable[str] = ()
) -> StepObjective:
    """The objective at `step` (from 1) of `total_steps`."""
    coefficients = tuple(value_at(term.coefficient, step, total_steps) for term in terms)
    return StepObjective(tuple(terms), coefficients, max_response_tokens, tuple(teachers))

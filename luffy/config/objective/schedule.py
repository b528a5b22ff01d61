"""Numbers that change over a stage: coefficients of terms, lengths of prefixes.

A plain number in YAML is a constant. Shares are of the stage's steps, so that a preset means the same for a run of
100 steps and one of 500.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, model_validator

from luffy.config.strict import StrictModel

_Share = Annotated[float, Field(gt=0.0, le=1.0)]


class ConstantValue(StrictModel):
    """The same at every step."""

    kind: Literal["constant"]
    value: float

    def formula(self) -> str:
        return f"{self.value:g}"


class LinearValue(StrictModel):
    """From `start` to `end` in a straight line, then `end`."""

    kind: Literal["linear"]
    start: float
    end: float
    over: _Share = 1.0
    """Share of the stage after which `end` is reached."""
    levels: Annotated[int, Field(ge=2)] | None = None
    """Move in this many windows of equal length, the first at `start`, the last at `end`. LUFFY's `linear_max` is
    {start: max, end: max / 10, levels: 10}."""

    @model_validator(mode="after")
    def _effective(self) -> "LinearValue":
        _moves(self)
        return self

    def formula(self) -> str:
        stairs = f" in {self.levels} levels" if self.levels else ""
        return f"{self.start:g} -> {self.end:g} (linear over {self.over:.0%} of the steps{stairs})"


class CosineValue(StrictModel):
    """From `start` to `end` along half a cosine, then `end`."""

    kind: Literal["cosine"]
    start: float
    end: float
    over: _Share = 1.0
    """Share of the stage after which `end` is reached."""

    @model_validator(mode="after")
    def _effective(self) -> "CosineValue":
        _moves(self)
        return self

    def formula(self) -> str:
        return f"{self.start:g} -> {self.end:g} (cosine over {self.over:.0%} of the steps)"


class WarmupCosineValue(StrictModel):
    """A straight line from `start` to `peak`, half a cosine from there to `end`, then `end` (CHORD's mu)."""

    kind: Literal["warmup_cosine"]
    start: float
    peak: float
    end: float
    warmup: _Share
    """Share of the stage after which `peak` is reached."""
    decay: _Share
    """Share of the stage between `peak` and `end`."""

    @model_validator(mode="after")
    def _fits(self) -> "WarmupCosineValue":
        if self.warmup + self.decay > 1.0:
            raise ValueError(f"warmup {self.warmup} and decay {self.decay} are together more than the whole stage")
        if self.start == self.peak == self.end:
            raise ValueError(f"a schedule that is {self.peak} throughout stays where it is; give just the number")
        return self

    def formula(self) -> str:
        return (
            f"{self.start:g} -> {self.peak:g} (linear over {self.warmup:.0%} of the steps) -> {self.end:g} "
            f"(cosine over {self.decay:.0%})"
        )


class AdaptiveValue(StrictModel):
    """An entropy bonus that holds the policy's entropy at a target.

    After each optimizer step log c moves by rate x (target - H), where H is the mean entropy of the step's selected
    tokens over all ranks: one number, the same on every rank. (The dual ascent of soft actor-critic, arXiv 1812.05905,
    section 5, as in LUFFY's `use_adaptive_temperature`; there each rank moves its own and they drift apart.)
    """

    kind: Literal["adaptive"]
    start: PositiveFloat
    target: PositiveFloat
    """Entropy to hold, in nats."""
    rate: PositiveFloat = 0.01
    minimum: PositiveFloat = 1e-6
    maximum: PositiveFloat = 0.1

    @model_validator(mode="after")
    def _ordered(self) -> "AdaptiveValue":
        if not self.minimum <= self.start <= self.maximum:
            raise ValueError(f"start {self.start} must lie between minimum {self.minimum} and maximum {self.maximum}")
        return self

    def formula(self) -> str:
        return (
            f"c (from {self.start:g}, moved to hold H at {self.target:g}, within [{self.minimum:g}, {self.maximum:g}])"
        )


def _moves(value: "LinearValue | CosineValue") -> None:
    if value.start == value.end:
        raise ValueError(f"a schedule from {value.start} to {value.end} stays where it is; give just the number")


def _number_as_constant(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"kind": "constant", "value": value} if is_number else value


_Scheduled = ConstantValue | LinearValue | CosineValue | WarmupCosineValue
ScheduledValue = Annotated[_Scheduled, Field(discriminator="kind"), BeforeValidator(_number_as_constant)]
"""A pure function of the step."""
Coefficient = Annotated[_Scheduled | AdaptiveValue, Field(discriminator="kind"), BeforeValidator(_number_as_constant)]
"""Coefficient of a term: a schedule, or a number that reacts to the policy."""


def constant(value: float) -> ConstantValue:
    """The schedule of a plain number."""
    return ConstantValue(kind="constant", value=value)


def depends_on_length(value: _Scheduled | AdaptiveValue) -> bool:
    """Whether the value at a step changes when the stage is made longer."""
    return not isinstance(value, ConstantValue | AdaptiveValue)


def bounds(value: _Scheduled) -> tuple[float, float]:
    """Smallest and largest value the schedule takes."""
    if isinstance(value, ConstantValue):
        return value.value, value.value
    ends = [value.start, value.end] + ([value.peak] if isinstance(value, WarmupCosineValue) else [])
    return min(ends), max(ends)

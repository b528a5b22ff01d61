"""Which prompts an RL step draws: `rl.sampling`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from luffy.config.objective.schedule import ScheduledValue, bounds, constant, depends_on_length
from luffy.config.strict import StrictModel


class UniformSampling(StrictModel):
    """Epochs of all prompts, each shuffled anew."""

    kind: Literal["uniform"]

    @property
    def depends_on_length(self) -> bool:
        """Whether the prompts of a step change when the stage is made longer."""
        return False


class CurriculumSampling(StrictModel):
    """Epochs of all prompts in sorted order; the seed orders ties, and prompts without the measure come last."""

    kind: Literal["curriculum"]
    by: Literal["difficulty", "trace_length"]
    """`difficulty`: the pass rate that the stage `difficulty` measured. `trace_length`: the number of tokens of the
    shortest trace."""
    direction: Literal["easy_first", "hard_first"] = "easy_first"

    @property
    def depends_on_length(self) -> bool:
        """Whether the prompts of a step change when the stage is made longer."""
        return False


class PoolShares(StrictModel):
    """Parts of a step's prompts, relative to each other. The defaults are PRIME-RL's weights, with new prompts like
    normal ones."""

    new: PositiveFloat = 1.0
    """Prompts that no step has drawn yet."""
    hard: NonNegativeFloat = 0.2
    normal: NonNegativeFloat = 1.0
    easy: NonNegativeFloat = 0.2

    @model_validator(mode="after")
    def _something_is_drawn_again(self) -> "PoolShares":
        if not (self.hard or self.normal or self.easy):
            raise ValueError("hard, normal and easy are all 0, so no prompt would be drawn a second time; raise one")
        return self


class PoolSampling(StrictModel):
    """Quotas from pools of prompts by their running pass rates (PRIME-RL's difficulty pools).

    A step takes the least recently drawn prompts of every pool. The others make up for a pool with too few prompts; one
    with share 0 only where nothing else is left. The pools of step s use the pass rates up to step s - 1 -
    `rl.max_staleness`, which are always available when it is planned.
    """

    kind: Literal["pools"]
    hard_at_most: ScheduledValue = constant(0.25)
    """Prompts with a running pass rate up to this are hard."""
    easy_above: ScheduledValue = constant(0.75)
    """Prompts with a running pass rate above this are easy; those between are normal."""
    shares: PoolShares = PoolShares()
    memory: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Weight of the previous running pass rate when a new group's is averaged in; 0: only the last group counts."""

    @property
    def depends_on_length(self) -> bool:
        """Whether the prompts of a step change when the stage is made longer."""
        return depends_on_length(self.hard_at_most) or depends_on_length(self.easy_above)

    @model_validator(mode="after")
    def _ordered(self) -> "PoolSampling":
        (hard_low, hard_high), (easy_low, easy_high) = bounds(self.hard_at_most), bounds(self.easy_above)
        if hard_low < 0 or easy_high > 1:
            raise ValueError("hard_at_most and easy_above are pass rates, between 0 and 1")
        if hard_low >= easy_low or hard_high >= easy_high:
            raise ValueError(
                f"hard_at_most ({hard_low:g} to {hard_high:g}) must be below easy_above ({easy_low:g} to "
                f"{easy_high:g}): no prompt would be normal"
            )
        return self


SamplingConfig = Annotated[UniformSampling | CurriculumSampling | PoolSampling, Field(discriminator="kind")]

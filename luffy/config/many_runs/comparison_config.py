"""Contents of the YAML file of a comparison."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from luffy.config.evaluation import VALIDATION
from luffy.config.many_runs.grid import Grid
from luffy.config.strict import StrictModel, is_none

_ArmName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class BudgetConfig(StrictModel):
    """How much every arm learns: exactly one of `optimizer_steps`, `rollouts` and `tokens`."""

    optimizer_steps: PositiveInt | None = None
    """Optimizer steps after the base policy, those of SFT (in all of its rounds) and of RL together."""
    rollouts: PositiveInt | None = None
    """Responses sampled during RL; steps of SFT are given by `sft_steps` and not counted."""
    tokens: PositiveInt | None = Field(default=None, exclude_if=is_none)
    """Tokens sampled and response tokens learned from, those of SFT and of RL together, so that a cheap method makes
    more steps. An arm ends after the step that reaches the number."""
    max_optimizer_steps: PositiveInt | None = Field(default=None, exclude_if=is_none)
    """With `tokens`: an arm that has not reached them ends after this many optimizer steps of SFT, or of RL."""

    @model_validator(mode="after")
    def _one_kind(self) -> "BudgetConfig":
        if [self.optimizer_steps, self.rollouts, self.tokens].count(None) != 2:
            raise ValueError("give exactly one of optimizer_steps, rollouts and tokens")
        if self.tokens is not None and self.max_optimizer_steps is None:
            raise ValueError("max_optimizer_steps: missing; tokens needs it, for an arm that spends too few")
        if self.tokens is None and self.max_optimizer_steps is not None:
            raise ValueError("max_optimizer_steps has no effect without tokens; remove it")
        return self

    @property
    def amount(self) -> int:
        """The number that is given, in `unit`."""
        return next(each for each in (self.optimizer_steps, self.rollouts, self.tokens) if each is not None)

    @property
    def unit(self) -> str:
        """What is counted, in words."""
        if self.optimizer_steps is not None:
            return "optimizer steps"
        return "rollouts" if self.rollouts is not None else "tokens"

    @property
    def text(self) -> str:
        """The budget in words."""
        return f"{self.amount:,} tokens" if self.tokens is not None else f"{self.amount} {self.unit}"


class SelectConfig(StrictModel):
    """How each arm's values are chosen: by runs of every point, evaluated on nothing that is reported.

    Every arm gets equally many points.
    """

    on: str = VALIDATION
    """`validation`: the prompts that `data.validation_prompts` holds out; or a suite of the experiment, which is then
    not reported."""
    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """Seeds of the runs that are chosen from; none of them is reported."""
    decoding: str | None = None
    """The decoding whose accuracy, mean over seeds and problems, decides; None: the experiment's first."""
    random: PositiveInt | None = None
    """Number of points sampled from each arm's grid, by the first of `seeds`; None: all points."""

    @model_validator(mode="after")
    def _seeds_differ(self) -> "SelectConfig":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: give each seed once")
        return self


class ArmConfig(StrictModel):
    """An arm: a chain, a method and overrides."""

    chain: str
    """A preset of `exp_configs/chains/`."""
    method: str
    """A preset of `exp_configs/methods/`; in a chain with RL, the method of RL."""
    sft_steps: PositiveInt | None = None
    """Optimizer steps of SFT, in all of its rounds, where RL follows; None: the chain has no SFT before RL, or
    `sft_tokens` sets it."""
    sft_tokens: PositiveInt | None = Field(default=None, exclude_if=is_none)
    """The share of `budget.tokens` that SFT learns from where RL follows."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, for this arm alone."""
    grid: Grid | None = None
    """Values to try, by key; None: those of the comparison's `grid`."""


class ComparisonConfig(StrictModel):
    """Contents of the YAML file of a comparison."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    experiment: str
    """The YAML of what all arms share: a path from this file's folder, or a shipped experiment's name."""
    overrides: tuple[str, ...] = ()
    """`key.path=value`, for all arms."""
    seeds: tuple[NonNegativeInt, ...] = Field(min_length=1)
    """Seeds of everything after the base: order of prompts, choice of traces, responses. Data, base and evaluation keep
    the experiment's seed."""
    reference: str
    """The arm that all others are tested against."""
    budget: BudgetConfig
    workers: PositiveInt = 1
    """Number of concurrent runs. Affects their time, never their results."""
    grid: Grid | None = None
    """Values to try for the keys of every arm that has no grid of its own."""
    select: SelectConfig | None = None
    """How each arm's values are chosen from its grid; None: nothing is tuned."""
    arms: dict[_ArmName, ArmConfig] = Field(min_length=2)

    @model_validator(mode="after")
    def _tuning_is_whole(self) -> "ComparisonConfig":
        grids = [self.grid, *(arm.grid for arm in self.arms.values())]
        if self.select is None and any(grid is not None for grid in grids):
            raise ValueError("select: missing; a grid needs it to choose its values")
        if self.select is not None and not any(grid is not None for grid in grids):
            raise ValueError("select: has no effect without a grid; give one, or remove it")
        both = sorted(set(self.select.seeds) & set(self.seeds)) if self.select is not None else []
        if both:
            raise ValueError(f"select.seeds: {both[0]} is also reported; values are chosen on seeds of their own")
        return self

    @model_validator(mode="after")
    def _names_are_right(self) -> "ComparisonConfig":
        if self.reference not in self.arms:
            raise ValueError(f"reference: no arm is called {self.reference!r}; there are {', '.join(self.arms)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: give each seed once")
        return self

"""Successive halving: how long the tries of each rung train, how many there are, and the experiment of one of them.

One bracket of Hyperband (Li et al., arXiv 1603.06560) with its terms; the rule is that of Jamieson and Talwalkar (arXiv
1502.07943). The resource is the comparison's budget, in its unit, and the last rung has all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from luffy.config.experiment import ExperimentConfig
from luffy.config.many_runs.comparison_config import BudgetConfig, HalvingConfig


@dataclass(frozen=True, slots=True)
class Rung:
    """Tries of one length."""

    number: int
    """From 1."""
    resource: int
    """How long each of its tries trains, from the base policy on, in the unit of the budget."""
    num_tries: int
    """Tries of each arm."""


def rungs_of(halving: HalvingConfig, budget: int, num_points: int) -> tuple[Rung, ...]:
    """The rungs, shortest first: `budget` divided by powers of `eta`, down to `min_resource`.

    The best 1/eta of a rung's tries go on, rounded up, so that never more are dropped than `eta` says.
    """
    resources = list(_resources(halving, budget))[::-1]
    tries = [num_points]
    for _ in resources[1:]:
        tries.append(ceil(tries[-1] / halving.eta))
    return tuple(
        Rung(number, resource, count)
        for number, (resource, count) in enumerate(zip(resources, tries, strict=True), start=1)
    )


def _resources(halving: HalvingConfig, budget: int) -> Iterator[int]:
    divisor = 1
    yield budget
    while budget // (divisor * halving.eta) >= halving.min_resource:
        divisor *= halving.eta
        yield budget // divisor


def check_rungs(halving: HalvingConfig, budget: BudgetConfig, num_points: int) -> None:
    """Raise ValueError, beginning with the key of `select.halving`, where a rung would decide nothing."""
    rungs = rungs_of(halving, budget.amount, num_points)
    if budget.amount < halving.eta:
        raise ValueError(f"eta: {halving.eta} is above the budget of {budget.text}, so there is no shorter rung")
    if len(rungs) < 2:
        raise ValueError(
            f"min_resource: {halving.min_resource} leaves no rung below the budget of {budget.text}; give at most "
            f"{budget.amount // halving.eta}"
        )
    if rungs[-1].num_tries < 2:
        raise ValueError(
            f"min_resource: {num_points} tries, of which the best 1/{halving.eta} go on, leave one for the last of "
            f"{len(rungs)} rungs, which has nothing to choose from; raise min_resource or try more values"
        )


def at_rung(config: ExperimentConfig, budget: BudgetConfig, rung: Rung) -> ExperimentConfig:
    """A try of `rung`, named after it; SFT keeps the checkpoint from which the next rung continues."""
    tried = at_resource(config, budget, rung.resource).model_copy(update={"name": f"{config.name}.rung{rung.number}"})
    if "rl" in config.stages or rung.resource == budget.amount:
        return tried
    checkpoint = config.execution.checkpoint.model_copy(update={"sft_last": True})
    return tried.model_copy(update={"execution": config.execution.model_copy(update={"checkpoint": checkpoint})})


def at_resource(config: ExperimentConfig, budget: BudgetConfig, resource: int) -> ExperimentConfig:
    """An arm's experiment of the whole `budget`, ended at `resource`: its last stage makes fewer steps.

    Raises ValueError, one line, where no whole number of its steps takes that.
    """
    less, rl = budget.amount - resource, config.rl
    if rl is None or "rl" not in config.stages:
        assert config.sft is not None
        return config.model_copy(update={"sft": config.sft.model_copy(update={"steps": resource})})
    a_step = rl.updates_per_step if budget.rollouts is None else budget.rollouts // rl.steps
    if less % a_step:
        raise ValueError(f"{resource} {budget.unit} end within an RL step, each of which takes {a_step}")
    steps = rl.steps - less // a_step
    if steps < 1:
        raise ValueError(f"{resource} {budget.unit} leave no step to RL after SFT")
    return config.model_copy(update={"rl": rl.model_copy(update={"steps": steps})})

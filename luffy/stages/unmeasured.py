"""What a training stage asks of its validation, the stage that has none, and what ends training early.

`luffy.stages.held_out` is the other one. It is imported where a stage has a validation and counts for its key only
there, so that a change of how answers are graded does not train a model again that was never measured by it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from luffy.tracking.token_budget import TokenBudget


class HeldOutMeasure(Protocol):
    """Measures the policy in training on held-out problems, and decides which weights the stage hands on."""

    @property
    def is_over(self) -> bool:
        """Whether training should end, as there was no new best for long."""
        ...

    def measure(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Metrics of the current weights, after `step` steps; empty where that step is not to be measured.

        `last`: training ends with this step, earlier than planned.
        """
        ...

    def export(self, folder: Path) -> None:
        """Write the model folder that the stage hands on."""
        ...


class Unmeasured:
    """A stage without validation: it trains to the last step and hands on the last weights."""

    is_over = False

    def __init__(self, export: Callable[[Path], None]) -> None:
        self._export = export

    def measure(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Nothing is measured."""
        return {}

    def export(self, folder: Path) -> None:
        """Write the current weights."""
        self._export(folder)


def end_of_training(held_out: HeldOutMeasure, budget: TokenBudget) -> str | None:
    """The setting that ends training before its last step; None: it goes on."""
    if held_out.is_over:
        return "validation.patience"
    return "max_tokens" if budget.is_over else None

"""The interface of validation to training stages, its null implementation, and early stopping.

`luffy.stages.held_out` is the real implementation. It is imported, and part of a stage's key, only if the stage has a
validation: a change of grading must not retrain a model that was trained without one.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from luffy.tracking.metrics import TokenBudget


class HeldOutMeasure(Protocol):
    """Measures the policy in training on held-out problems, and decides which weights become the stage's result."""

    @property
    def is_over(self) -> bool:
        """Whether training should end, since there has been no new best for `patience` measurements."""
        ...

    def measure(self, step: int, *, last: bool = False) -> dict[str, float]:
        """Metrics of the current weights, after `step` steps; empty where that step is not to be measured.

        `last`: training ends with this step, earlier than planned.
        """
        ...

    def export(self, folder: Path) -> None:
        """Write the model folder that is the stage's result."""
        ...


class Unmeasured:
    """No validation: the stage trains to the last step, and its result is the last weights."""

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
    """The setting that ends training before its last step; None: training continues."""
    if held_out.is_over:
        return "validation.patience"
    return "max_tokens" if budget.is_over else None

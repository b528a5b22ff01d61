"""The interface between the RL stage and the processes that it runs on."""

from typing import Protocol

from luffy.rollout.engine import RolloutEngine
from luffy.training.learner import Trainer


class Cluster(Protocol):
    """A trainer, a rollout engine, and the transfer of weights between them.

    A context manager: everything it started ends with the context.
    """

    @property
    def trainer(self) -> Trainer: ...

    @property
    def engine(self) -> RolloutEngine:
        """Generates with the weights published last."""
        ...

    def publish(self, version: int) -> None:
        """Send the trainer's current weights, after `version` RL steps, to the engine unless it has them."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the cluster for the step's log (`perf/`)."""
        ...

    def __enter__(self) -> "Cluster": ...

    def __exit__(self, *_: object) -> None: ...

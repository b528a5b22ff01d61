"""What the RL stage asks of the place it runs in."""

from typing import Protocol

from luffy.rollout.engine import RolloutEngine
from luffy.training.trainer import Trainer


class Cluster(Protocol):
    """A trainer, an engine, and the weights that go from one to the other.

    A context manager: whatever it has started ends with the context.
    """

    @property
    def trainer(self) -> Trainer: ...

    @property
    def engine(self) -> RolloutEngine:
        """Generates with the weights that were published last."""
        ...

    def publish(self, version: int) -> None:
        """Give the engine the trainer's present weights, those behind `version` RL steps; at once if it has them."""
        ...

    def metrics(self) -> dict[str, float]:
        """What a step may want to tell of it (`perf/`)."""
        ...

    def __enter__(self) -> "Cluster": ...

    def __exit__(self, *_: object) -> None: ...

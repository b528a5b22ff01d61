"""An engine and a rank that stop at a chosen place, so that a test can kill them there or let them go on."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luffy.cluster import weights
from luffy.cluster.actors import EngineActor, ProcessSetup, RankActor
from luffy.tensor_sharing import SharedTensor, TensorSpec

_LOOK_S = 0.05


@dataclass(frozen=True)
class Gate:
    """A place in one process, which is known by its log file. Open until `close`; stops the first thread after that."""

    log: Path
    place: str

    @property
    def _closed(self) -> Path:
        return self.log.with_suffix(f".{self.place}.closed")

    @property
    def _reached(self) -> Path:
        return self.log.with_suffix(f".{self.place}.reached")

    def close(self) -> None:
        self._reached.unlink(missing_ok=True)
        self._closed.touch()

    def open(self) -> None:
        """A thread that waits goes on waiting."""
        self._closed.unlink(missing_ok=True)

    def release(self) -> None:
        """Let the thread that waits go on."""
        self._reached.unlink()

    def is_reached(self) -> bool:
        return self._reached.exists()

    def enter(self) -> None:
        """Pass an open gate; at a closed one, say so, and wait to be killed or released.

        The next process finds it open.
        """
        try:
            self._closed.rename(self._reached)
        except FileNotFoundError:
            return
        while self._reached.exists():
            time.sleep(_LOOK_S)


class GatedEngineActor(EngineActor):
    """Gates: `answered` (the first responses of a call are complete), `received` (a bucket of weights has come),
    `copying` (a rank has the last layer ready to be copied)."""

    def __init__(self, setup: ProcessSetup) -> None:
        super().__init__(setup)
        self._log = setup.log

    def open(self, *arguments: Any, **options: bool) -> None:
        super().open(*arguments, **options)
        step = self._engine._llm.step

        def gated_step() -> Sequence[Any]:
            outputs = step()
            if any(output.finished for output in outputs):
                Gate(self._log, "answered").enter()
            return outputs

        self._engine._llm.step = gated_step

    def receive(self, bucket: Any) -> None:
        super().receive(bucket)
        Gate(self._log, "received").enter()

    def receive_shared(self, specs: Sequence[TensorSpec], data: SharedTensor) -> str | None:
        if any("model.layers.1." in spec.name for spec in specs):
            Gate(self._log, "copying").enter()
        return super().receive_shared(specs, data)


class GatedRankActor(RankActor):
    """Gates: the names of the methods that it is asked for, before it begins with them.

    Weights go in buckets so small that a tiny model fills several.
    """

    def __init__(self, setup: ProcessSetup) -> None:
        super().__init__(setup)
        self._log = setup.log

    def open(self, *arguments: Any) -> None:
        super().open(*arguments)
        weights._BUCKET_BYTES = 2**14

    def call(self, method: Callable[..., Any], *arguments: object) -> Any:
        Gate(self._log, method.__name__).enter()
        return super().call(method, *arguments)

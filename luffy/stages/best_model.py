"""The best measured weights of a stage in training: model folders in `best/`, without optimizer states.

Which step is best follows from the measurements alone, so that a run that was killed finds the same one. A folder of a
better step replaces older ones only when a checkpoint stands between them: a killed run goes back to its newest
checkpoint, and needs the best weights up to there.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from luffy.config.evaluation import KeepBestConfig
from luffy.errors import CheckpointError
from luffy.pipeline.reuse import complete_checkpoints
from luffy.tracking.metrics import MetricRow

BEST_FOLDER = "best"
_INCOMING = "incoming"
Exporter = Callable[[Path], None]
"""Writes the current weights as a model folder."""


class BestModel:
    """Keeps the weights of the best step in the stage directory `out`; `history` are metrics of steps before."""

    def __init__(self, out: Path, config: KeepBestConfig, export: Exporter, history: Iterable[MetricRow]) -> None:
        self._out = out
        self._metric = f"val/{config.metric}"
        self._sign = 1.0 if config.mode == "max" else -1.0
        self._export = export
        self._values = {int(row["step"]): row[self._metric] for row in history if self._metric in row}

    def observe(self, step: int, metrics: MetricRow) -> None:
        """Record the measurement of the current weights, and keep them if they are the best so far."""
        self._values[step] = metrics[self._metric]
        if self.step == step:
            incoming = self._out / BEST_FOLDER / _INCOMING
            shutil.rmtree(incoming, ignore_errors=True)
            incoming.parent.mkdir(exist_ok=True)
            self._export(incoming)
            shutil.rmtree(self._folder(step), ignore_errors=True)
            incoming.replace(self._folder(step))
        self._delete_others()

    @property
    def step(self) -> int:
        """The best step so far, the earliest of equals."""
        return self._best(self._values)

    @property
    def num_later(self) -> int:
        """Number of measurements since the best one."""
        return sum(step > self.step for step in self._values) if self._values else 0

    def hand_on(self, folder: Path) -> None:
        """Copy the best weights to `folder`; CheckpointError if they were deleted."""
        source = self._folder(self.step)
        if not source.is_dir():
            raise CheckpointError(f"{source}: the best weights are gone; delete {self._out} to train again")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)

    def _best(self, steps: Iterable[int]) -> int:
        return max(sorted(steps), key=lambda step: self._sign * self._values[step])

    def _delete_others(self) -> None:
        newest = max(complete_checkpoints(self._out), default=0)
        saved = [step for step in self._values if step <= newest]
        kept = {self._folder(step) for step in self._values if step > newest and step >= self.step}
        kept |= {self._folder(self._best(saved))} if saved else set()
        for folder in (self._out / BEST_FOLDER).glob("step_*"):
            if folder not in kept:
                shutil.rmtree(folder)

    def _folder(self, step: int) -> Path:
        return self._out / BEST_FOLDER / f"step_{step:06d}"

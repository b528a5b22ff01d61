"""From which step a training stage goes on, where it ends, and what it exports then: the last weights, or the best.

With `keep_best`, the best measured weights become the stage's `model/`, which evaluations and later stages read: it is
the model that the stage hands on, not a by-product. The weights of the last step stay in RL's last checkpoint.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from luffy.config.evaluation import ValidationConfig
from luffy.errors import CheckpointError
from luffy.files import link_or_copy
from luffy.pipeline.reuse import CHECKPOINTS_FOLDER, complete_checkpoints, newest_checkpoint
from luffy.tracking.metrics import METRICS_FILE, metrics_until

BEST_FOLDER = "best"
_INCOMING = "incoming"
_HISTORY = ("metrics.jsonl", "samples.jsonl")
Exporter = Callable[[Path], None]
"""Writes the current weights as a model folder."""


class HeldOut:
    """Measures a policy in training and, with `keep_best`, keeps the best weights in the stage directory `out`.

    `measure_weights(step)` returns the metrics of the current weights, those after that many steps, which `export`
    writes. `last_step` is measured, whatever the interval. Without a `schedule` nothing is measured: the stage trains
    to the last step, and its result is the last weights.

    Which step is best follows from the measurements alone, so that a run that was killed finds the same one; those up
    to the newest checkpoint, from which the stage resumes, are read from its metrics. The best weights are a model
    folder without optimizer states. A folder of a better step replaces older ones only when a checkpoint stands between
    them: a killed run goes back to its newest checkpoint, and needs the best weights up to there.
    """

    def __init__(
        self,
        export: Exporter,
        out: Path,
        last_step: int,
        schedule: ValidationConfig | None,
        measure_weights: Callable[[int], dict[str, float]] | None = None,
    ) -> None:
        self._export = export
        self._out = out
        self._last_step = last_step
        self._schedule = schedule
        self._measure_weights = measure_weights
        self._keep_best = None if schedule is None else schedule.keep_best
        self._values: dict[int, float] = {}
        """What `keep_best` compares, by step."""
        if self._keep_best is not None:
            metric = f"val/{self._keep_best.metric}"
            history = metrics_until(out / METRICS_FILE, max(complete_checkpoints(out), default=0))
            self._values = {int(row["step"]): row[metric] for row in history if metric in row}

    @property
    def is_over(self) -> bool:
        """Whether `patience` measurements in a row brought no new best."""
        if self._schedule is None or self._schedule.patience is None or not self._values:
            return False
        best = self._best_of(self._values)
        return sum(step > best for step in self._values) >= self._schedule.patience

    def measure(self, step: int) -> dict[str, float]:
        """Metrics of the current weights, after `step` steps; empty where that step is not to be measured."""
        if self._schedule is None or (step % self._schedule.every and step != self._last_step):
            return {}
        began = time.perf_counter()
        assert self._measure_weights is not None
        metrics = self._measure_weights(step)
        if self._keep_best is not None:
            self._values[step] = metrics[f"val/{self._keep_best.metric}"]
            self._keep(step)
        return metrics | {"perf/validation_s": time.perf_counter() - began}

    def export(self, folder: Path) -> None:
        """Write the best measured weights (CheckpointError if they were deleted), or without `keep_best` the current
        ones."""
        if self._keep_best is None:
            self._export(folder)
            return
        source = self._folder(self._best_of(self._values))
        if not source.is_dir():
            raise CheckpointError(f"{source}: the best weights are gone; delete {self._out} to train again")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)

    def _keep(self, step: int) -> None:
        """Keep the weights of this step if they are the best so far, and delete those that no run needs."""
        best = self._best_of(self._values)
        if best == step:
            incoming = self._out / BEST_FOLDER / _INCOMING
            shutil.rmtree(incoming, ignore_errors=True)
            incoming.parent.mkdir(exist_ok=True)
            self._export(incoming)
            shutil.rmtree(self._folder(step), ignore_errors=True)
            incoming.replace(self._folder(step))
        newest = max(complete_checkpoints(self._out), default=0)
        saved = [step for step in self._values if step <= newest]
        kept = {self._folder(step) for step in self._values if step > newest and step >= best}
        kept |= {self._folder(self._best_of(saved))} if saved else set()
        for folder in (self._out / BEST_FOLDER).glob("step_*"):
            if folder not in kept:
                shutil.rmtree(folder)

    def _best_of(self, steps: Iterable[int]) -> int:
        """The earliest of equals."""
        assert self._keep_best is not None
        sign = 1.0 if self._keep_best.mode == "max" else -1.0
        return max(sorted(steps), key=lambda step: sign * self._values[step])

    def _folder(self, step: int) -> Path:
        return self._out / BEST_FOLDER / f"step_{step:06d}"


def adopt_shorter_run(finished: Path, out: Path, folders: Sequence[str] = ()) -> None:
    """Continue a finished run of `sft` or `rl` in a longer one of the same series; the shorter run is not modified.

    Copies the history, the `folders` and the newest checkpoint of `finished` to `out`.

    The checkpoint comes last, by a single rename: after a kill before that, the longer run starts from the beginning.
    """
    newest = newest_checkpoint(finished)
    if newest is None or not all((finished / name).is_dir() for name in folders):
        return  # deleted since the plan was made: the longer run starts from the beginning
    checkpoint = newest[1]
    for name in _HISTORY:
        if (finished / name).exists():
            shutil.copy2(finished / name, out / name)
    for name in folders:
        shutil.copytree(finished / name, out / name, copy_function=link_or_copy, dirs_exist_ok=True)
    incoming = out / CHECKPOINTS_FOLDER / f"incoming_{checkpoint.name}"
    shutil.rmtree(incoming, ignore_errors=True)
    shutil.copytree(checkpoint, incoming, copy_function=link_or_copy)
    target = out / CHECKPOINTS_FOLDER / checkpoint.name
    shutil.rmtree(target, ignore_errors=True)  # an incomplete checkpoint left by a kill
    incoming.replace(target)

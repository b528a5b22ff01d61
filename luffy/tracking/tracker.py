"""Where a training loop reports: metrics and samples go to files always, and to wandb when configured.

with Tracker(context.out, context.key, context.node, context.tracking, settings, resumed_from=step) as tracker:
    tracker.log(step, {"actor/loss": 0.3})
    tracker.samples(step, rollouts)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from luffy.config.execution import TrackingConfig
from luffy.config.strict import StrictModel
from luffy.tracking.metrics import METRICS_FILE, MetricsWriter, check_names
from luffy.tracking.samples import SAMPLES_FILE, SampleRollout, SamplesWriter
from luffy.tracking.wandb_run import WandbRun

_NOTHING = -1
"""Comes before step 0."""


class Tracker:
    """Writes `metrics.jsonl` and, once there is a sample, `samples.jsonl` in `out`.

    Steps count from 1; step 0 is a validation of the weights that training starts from. Lines after step `resumed_from`
    are dropped first, all of them where it is 0, so that after a resume the files equal those of an uninterrupted run.
    `key` and `name` are the stage's; `settings` are shown in wandb.
    """

    def __init__(
        self,
        out: Path,
        key: str,
        name: str,
        tracking: TrackingConfig,
        settings: StrictModel,
        resumed_from: int = 0,
    ) -> None:
        self._metrics = MetricsWriter(out / METRICS_FILE)
        self._metrics.truncate(resumed_from or _NOTHING)
        self._samples_path = out / SAMPLES_FILE
        self._samples: SamplesWriter | None = None
        if self._samples_path.exists():
            self._open_samples().truncate(resumed_from)
        self._wandb = WandbRun(out, key, name, tracking, settings.model_dump(mode="json"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`; their names start with one of `NAMESPACES`."""
        check_names(metrics)
        self._metrics.write(step, metrics)
        self._wandb.log(step, metrics)

    def samples(self, step: int, rows: Sequence[SampleRollout]) -> None:
        """Record rollouts of `step`."""
        self._open_samples().write(step, rows)
        self._wandb.samples(step, rows)

    def close(self, *, failed: bool = False) -> None:
        """Make the files durable and end the wandb run."""
        self._metrics.close()
        if self._samples is not None:
            self._samples.close()
        self._wandb.close(failed=failed)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _open_samples(self) -> SamplesWriter:
        if self._samples is None:
            self._samples = SamplesWriter(self._samples_path)
        return self._samples

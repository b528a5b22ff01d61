"""GPU-hours of a stage so far, its earlier attempts included."""

import time
from pathlib import Path

from luffy.tracking.metrics import METRICS_FILE, read_metrics

GPU_HOURS = "perf/gpu_hours"
_SECONDS_AN_HOUR = 3600.0


class GpuHours:
    """Counts from its creation, and from where the metrics in `out` end.

    Create it before anything else in a stage: loading a model holds the GPUs, too. The steps that a killed attempt lost
    count as well, since their GPUs were in use; only the time after an attempt's last metrics is missing.
    """

    def __init__(self, out: Path) -> None:
        self._began = time.monotonic()
        self._earlier = max((row.get(GPU_HOURS, 0.0) for row in read_metrics(out / METRICS_FILE)), default=0.0)

    def metrics(self, num_gpus: int) -> dict[str, float]:
        """`perf/gpu_hours` with that many GPUs held all the time; empty without GPUs.

        There is no such metric for CPUs: a stage does not hold their cores alone.
        """
        if not num_gpus:
            return {}
        elapsed = time.monotonic() - self._began
        return {GPU_HOURS: self._earlier + num_gpus * elapsed / _SECONDS_AN_HOUR}

"""Where a training loop reports: metrics and samples go to files always, and to the services that are configured.

with Tracker(context.out, context.key, context.labels, context.tracking, settings, resumed_from=step) as tracker:
    tracker.log(step, {"actor/loss": 0.3})
    tracker.samples(step, rollouts)

`samples.jsonl` has a few rollouts at intervals, as readable text.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from luffy.config.execution import TrackingConfig
from luffy.config.strict import StrictModel
from luffy.processes import stage_began
from luffy.tracking.metrics import METRICS_FILE, StepLines, metric_line, read_lines
from luffy.tracking.services import TrackedRun, open_services
from luffy.tracking.step_times import START

SAMPLES_FILE = "samples.jsonl"
_NOTHING = -1
"""Comes before step 0."""


@dataclass(frozen=True, slots=True)
class SampleRollout:
    """One response of one RL step."""

    uid: str
    prompt: str
    response: str
    source: Literal["on_policy", "off_policy"]
    reward: float
    outcome: str
    advantage: float | None
    """Advantage of the whole response, before any scaling; None where each token has its own (GAE)."""
    measures: dict[str, float] = field(default_factory=dict)
    """Rewards by component and counts of an episode with an environment."""
    start: str | None = None
    """Name of what it was given in `objective.group.starts`; None: nothing."""
    dose: float | None = None
    """Share of a trace that it was given; None: nothing, a whole trace or a critique."""
    hint: str = ""
    """What was in the prompt while the response was sampled."""
    reference: str = ""
    """The reference answer; empty in files of earlier versions."""


def read_samples(path: Path) -> Iterator[tuple[int, SampleRollout]]:
    """Yield (step, rollout) in the order of the file; nothing where there is no file."""
    rollout = TypeAdapter(SampleRollout)
    for line in read_lines(path):
        step = line["step"]
        assert isinstance(step, int)
        yield step, rollout.validate_python(line)


class Tracker:
    """Writes `metrics.jsonl` and, once there is a sample, `samples.jsonl` in `out`.

    Steps count from 1; step 0 is a validation of the weights that training starts from. Lines after step `resumed_from`
    are dropped first, all of them where it is 0, so that after a resume the files equal those of an uninterrupted run.
    `key` and `labels` (`TrackedRun.labels`) are the stage's; services also show its `settings`.
    """

    def __init__(
        self,
        out: Path,
        key: str,
        labels: Mapping[str, str],
        tracking: TrackingConfig,
        settings: StrictModel,
        resumed_from: int = 0,
    ) -> None:
        self._start: dict[str, float] = {}
        self._metrics = StepLines(out / METRICS_FILE)
        self._metrics.truncate(resumed_from or _NOTHING)
        self._samples_path = out / SAMPLES_FILE
        self._samples: StepLines | None = None
        if self._samples_path.exists():
            self._samples = StepLines(self._samples_path)
            self._samples.truncate(resumed_from)
        run = TrackedRun(key, labels, out, settings.model_dump(mode="json"), resumed_from)
        self._services = open_services(run, tracking)

    def started(self) -> None:
        """Record, with the next line, how long it took until now from the start of the stage's program."""
        self._start = {START: time.time() - stage_began()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`; their names start with one of `NAMESPACES`."""
        whole = {**metrics, **self._start}
        self._start = {}
        self._metrics.append(metric_line(step, whole))
        for service in self._services:
            service.call(lambda shown: shown.log(step, whole))

    def samples(self, step: int, rows: Sequence[SampleRollout]) -> None:
        """Record rollouts of `step`."""
        if self._samples is None:
            self._samples = StepLines(self._samples_path)
        for row in rows:
            self._samples.append({"step": step, **asdict(row)})
        for service in self._services if rows else ():
            service.call(lambda shown: shown.samples(step, rows))

    def close(self, *, failed: bool = False) -> None:
        """Make the files durable and end what services show."""
        self._metrics.close()
        if self._samples is not None:
            self._samples.close()
        for service in self._services:
            service.close(failed=failed)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

"""Where a training loop reports: metrics and samples go to files always, and to wandb when configured.

with Tracker(context.out, context.key, context.node, context.tracking, settings, resumed_from=step) as tracker:
    tracker.log(step, {"actor/loss": 0.3})
    tracker.samples(step, rollouts)

`samples.jsonl` has a few rollouts at intervals, as readable text.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from pydantic import TypeAdapter

from luffy.config.execution import TrackingConfig
from luffy.config.strict import StrictModel
from luffy.tracking.metrics import METRICS_FILE, MetricsWriter, StepLines, check_names, read_lines
from luffy.tracking.wandb_run import WandbRun

SAMPLES_FILE = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class SampleRollout:
    """One response of one RL step."""

    uid: str
    """Identity of the prompt."""
    prompt: str
    response: str
    source: Literal["on_policy", "off_policy"]
    reward: float
    outcome: str
    advantage: float | None
    """Advantage of the whole response, before any scaling; None where each token has its own (GAE)."""
    measures: dict[str, float] = field(default_factory=dict)
    """Rewards by component and counts of an episode with an environment."""
    hint_level: int | None = None
    """Level of the hint that was in the prompt while the response was sampled; None: no hint."""
    hint: str = ""
    """The hint's text."""


class SamplesWriter:
    """Appends rollouts, one a line, each with its step."""

    def __init__(self, path: Path) -> None:
        self._lines = StepLines(path)

    def write(self, step: int, rows: Sequence[SampleRollout]) -> None:
        """Add the rollouts of `step`."""
        for row in rows:
            self._lines.append({"step": step, **asdict(row)})

    def truncate(self, after_step: int) -> None:
        """Drop the steps after `after_step`: a run that resumes there writes them again."""
        self._lines.truncate(after_step)

    def close(self) -> None:
        self._lines.close()


def read_samples(path: Path) -> Iterator[tuple[int, SampleRollout]]:
    """Yield (step, rollout) in the order of the file; nothing where there is no file."""
    rollout = TypeAdapter(SampleRollout)
    for line in read_lines(path):
        step = line["step"]
        assert isinstance(step, int)
        yield step, rollout.validate_python(line)


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

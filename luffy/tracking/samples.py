"""`samples.jsonl`: a few rollouts at intervals, as readable text."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from luffy.tracking.metrics import StepLines, read_lines

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

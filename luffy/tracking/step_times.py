"""Where the time of a training stage's steps went: parts that add up to a step, from its metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from luffy.tracking.metrics import MetricRow

START = "perf/start_s"
"""Seconds from the start of the stage's program to its first step; in the first row that an attempt logs."""
_STEP, _AHEAD = "perf/step_s", "perf/queue_depth"
_SCORING = ("perf/batch_s", "perf/logp_old_s", "perf/reference_s", "perf/teacher_s")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Means over the steps of a stage."""

    parts: Mapping[str, float]
    """Seconds of a step that the trainer spent in each part, all of them; they add up to the step.

    `generation` without `grading`; `weights`: their way to the engines; `scoring`: the batch, and log-probabilities
    under the old policy, the reference and the teacher; `update`: the optimizer steps. `waiting` is the rest of the
    wait for rollouts: all of it where they are generated ahead, beside the training. `other`: everything else."""
    tokens_per_s: float
    """Tokens of the step's rows, prompts included."""
    mfu: float | None
    """Model FLOPs utilisation of `scoring` and `update`; None where the peak of the GPU is not known."""
    start_s: float
    """Seconds from the program's start to its first step, of all attempts together."""

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())


def step_times(steps: Sequence[MetricRow], rows: Sequence[MetricRow] = ()) -> StepTimes | None:
    """The means over `steps`, with the start from `rows`, all of the stage's; None where no step tells its time."""
    timed = [row for row in steps if _STEP in row]
    if not timed:
        return None
    parts = [_parts(row) for row in timed]
    seconds = [row[_STEP] for row in timed]
    known = [
        (row["perf/mfu"], sum(row.get(name, 0.0) for name in (*_SCORING, "perf/update_s")))
        for row in timed
        if math.isfinite(row.get("perf/mfu", math.nan))
    ]
    computed = sum(spent for _, spent in known)  # what the utilisation is a share of
    return StepTimes(
        {name: fmean(part[name] for part in parts) for name in parts[0]},
        tokens_per_s=sum(row["perf/tokens_per_s"] * row[_STEP] for row in timed) / sum(seconds),
        mfu=sum(mfu * spent for mfu, spent in known) / computed if computed else None,
        start_s=sum(row.get(START, 0.0) for row in rows),
    )


def _parts(row: MetricRow) -> dict[str, float]:
    weights = row.get("perf/weights_s", 0.0)
    waited = max(0.0, row.get("perf/trainer_idle_s", 0.0) - weights)
    # Rollouts that are generated ahead take no time of the trainer's but what it waits.
    grading = 0.0 if _AHEAD in row else min(waited, row.get("perf/grading_s", 0.0))
    busy = 0.0 if _AHEAD in row else min(waited, row.get("perf/generation_s", 0.0))
    found = {
        "generation": max(0.0, busy - grading),
        "grading": grading,
        "weights": weights,
        "scoring": sum(row.get(name, 0.0) for name in _SCORING),
        "update": row.get("perf/update_s", 0.0),
        "waiting": waited - max(busy, grading),
    }
    return found | {"other": row[_STEP] - sum(found.values())}

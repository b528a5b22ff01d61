"""Time of the validation (`sft.validation`, `rl.validation`) within a stage: what it measures, and how often."""

import hashlib
from collections.abc import Mapping, Sequence
from statistics import fmean

from luffy.config.settings import StageSettings
from luffy.config.strict import FOR_IDENTITY
from luffy.config.validation import HeldOutSettings
from luffy.pipeline.chain.identity import Json, canonical_json
from luffy.tracking.metrics import MetricRow

_SECONDS = "perf/validation_s"
_WHEN = ("every", "keep_best", "patience")
"""Fields of the schedule that do not affect the time of a single measurement."""
_DIGEST_LENGTH = 16


def validation_of(settings: StageSettings) -> HeldOutSettings | None:
    """The validation of a stage; None without one."""
    found = getattr(settings, "validation", None)
    return found if isinstance(found, HeldOutSettings) else None


def measured_by(validation: HeldOutSettings | None) -> str:
    """Digest of what one measurement samples and grades, equal for those that take equally long; empty without any."""
    return "" if validation is None else recorded_as(validation.model_dump(mode="json", context=FOR_IDENTITY))


def recorded_as(validation: Mapping[str, Json] | None) -> str:
    """The same for the settings in a manifest."""
    if not validation:
        return ""
    schedule = validation["schedule"]
    assert isinstance(schedule, dict)
    what = {**validation, "schedule": {name: value for name, value in schedule.items() if name not in _WHEN}}
    return hashlib.sha256(canonical_json(what).encode()).hexdigest()[:_DIGEST_LENGTH]


def num_measurements(every: int, start: int, steps: int) -> int:
    """Measurements of a stage of `steps` that goes on after step `start`.

    They come before the first step, every `every` steps, and after the last one.
    """
    before = 1 if start == 0 else 0
    return before + steps // every - start // every + (1 if steps % every and steps > start else 0)


def mean_seconds(rows: Sequence[MetricRow]) -> float | None:
    """Mean time of one measurement; None where none was made."""
    seconds = [row[_SECONDS] for row in rows if _SECONDS in row]
    return fmean(seconds) if seconds else None


def total_seconds(rows: Sequence[MetricRow]) -> float:
    """Time of all measurements."""
    return sum(row.get(_SECONDS, 0.0) for row in rows)

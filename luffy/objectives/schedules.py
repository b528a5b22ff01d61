"""Multipliers over the optimizer steps of a stage: pure functions of the step, so that a resumed run agrees."""

import math

from luffy.config.training import ScheduleConfig


def schedule_multiplier(config: ScheduleConfig, step: int, total_steps: int) -> float:
    """Multiplier for optimizer step `step` (counted from 0) of `total_steps`.

    Warm-up climbs linearly and reaches 1 with its last step; `linear` and `cosine` then fall to `final_share` at the
    last step of the stage.
    """
    warmup_steps = math.ceil(round(config.warmup_share * total_steps, 6))  # 0.07 x 100 is 7, not 7.000000000000001
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - 1 - warmup_steps, 1)
    if config.kind == "constant":
        return 1.0
    fall = progress if config.kind == "linear" else 0.5 * (1.0 - math.cos(math.pi * progress))
    return 1.0 - (1.0 - config.final_share) * fall

"""The names of the stages."""

from typing import Literal

StageName = Literal["prepare_data", "base", "difficulty", "sft", "rl", "evaluate", "report", "sweep"]
"""The stage programs. `sweep` belongs to no chain: it is asked for, over an RL run that is there."""
STAGE_ORDER: tuple[StageName, ...] = (
    "prepare_data",
    "base",
    "difficulty",
    "sft",
    "rl",
    "evaluate",
    "report",
)

"""The sequence of stages in a chain with their names; `sample` and `sft` occur once per round."""

from collections.abc import Sequence
from dataclasses import dataclass

from luffy.config.experiment import ExperimentConfig


@dataclass(frozen=True, slots=True)
class StageVisit:
    """One stage of a chain."""

    name: str
    """Unique in the chain."""
    stage: str
    """Its kind's name."""
    round: int = 0
    """Which round of sampling and SFT, from 1; 0 outside of rounds."""


def visits_of(config: ExperimentConfig) -> list[StageVisit]:
    """The stages in order.

    Those of rounds always have their number (`sample_1`, `sft_1`), so that a chain with more rounds gives them the same
    names; others only where there are several of a kind.
    """
    stages = list(config.stages)
    if "sample" not in stages:
        return _numbered(stages)
    start = stages.index("sample")
    end = stages.index("sft", start) + 1 if "sft" in stages[start:] else start + 1
    rounds = [
        StageVisit(f"{stage}_{number}", stage, number)
        for number in range(1, config.expert_iteration.rounds + 1)
        for stage in stages[start:end]
    ]
    return [*_numbered(stages[:start]), *rounds, *_numbered(stages[end:])]


def _numbered(stages: Sequence[str]) -> list[StageVisit]:
    """A repeated stage is numbered (`sft_1`, `sft_2`)."""
    counts = [stages[: place + 1].count(stage) for place, stage in enumerate(stages)]
    return [
        StageVisit(f"{stage}_{number}" if stages.count(stage) > 1 else stage, stage)
        for stage, number in zip(stages, counts, strict=True)
    ]

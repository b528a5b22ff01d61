"""SFT of a tiny model on all ranks of a process group, whole or ended after a step and resumed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from luffy.config.model import LoRAConfig
from luffy.config.training import ScheduleConfig
from luffy.training.ranks import init_process_group
from luffy.training.supervised import SupervisedPlan, SupervisedRank, SupervisedSpec, SupervisedTrainer
from reference.gradient_case import OPTIMIZER, execution, terms_of, trajectories

SCHEDULE = ScheduleConfig(kind="linear", final_share=0.25)
PLAN = SupervisedPlan(
    steps=4,
    batch_size=5,
    optimizer=OPTIMIZER.model_copy(update={"schedule": SCHEDULE}),
    terms=terms_of("sft"),
    checkpoint_every=2,
    seed=3,
)
PHASED = replace(
    PLAN,
    optimizer=PLAN.optimizer.model_copy(update={"lr": 3.0}),  # so large that ratios are far from 1
    terms=terms_of("psft"),
    steps_per_phase=2,
)
ENDS_AFTER = 3
"""The step after which an interrupted run ends; its newest checkpoint is one step older."""


class OwnRank:
    """All ranks, each of which calls itself, as every process of the group runs the same program."""

    num_gpus = 0

    def __init__(self, rank: SupervisedRank) -> None:
        self._rank = rank
        self.num_ranks = dist.get_world_size()

    def call(self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [method(self._rank, *arguments[dist.get_rank()])]


class Ended(Exception):
    """The run was interrupted."""


def sft(
    model: Path,
    out: Path,
    *,
    start: int = 0,
    ends: bool = False,
    rank: int | None = None,
    phased: bool = False,
    **settings: object,
) -> list[dict[str, float]]:
    """Train from step `start`, to the end or (`ends`) until `ENDS_AFTER`, and export; returns the steps' metrics.

    With `rank`, it trains an adapter; `phased`: with ratios to the policy before each two steps.
    """
    plan = PHASED if phased else PLAN
    init_process_group()
    lora = None if rank is None else LoRAConfig(rank=rank, alpha=2.0 * rank)
    spec = SupervisedSpec(plan, execution(**settings), "float32", model, out, pad_id=0, lora=lora)
    trainer = SupervisedTrainer(plan, OwnRank(spec.open_rank()))
    history: list[dict[str, float]] = []

    def on_step(step: int, metrics: dict[str, float]) -> None:
        history.append(metrics)
        if ends and step == ENDS_AFTER:
            raise Ended

    try:
        trainer.train(trajectories("sft")[0], start, on_step)
    except Ended:
        return history
    trainer.export(out / "model")
    return history

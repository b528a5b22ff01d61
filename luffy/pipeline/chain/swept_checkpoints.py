"""Checks that the checkpoints to evaluate were kept."""

from luffy.config import ExperimentConfig
from luffy.errors import DataError
from luffy.pipeline.chain.checkpoints import complete_checkpoints
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace


def check_checkpoints(config: ExperimentConfig, steps: tuple[int, ...], workspace: Workspace) -> None:
    """Raise DataError unless the RL run of `config` is finished and has kept `steps`, or all of them are evaluated."""
    if not steps:
        return
    plans = {plan.node.name: plan for plan in open_experiment(config, workspace, sweep_steps=steps).plan()}
    if plans["sweep"].action == "reuse":
        return
    rl = plans["rl"]
    if rl.action != "reuse":
        reason = f"{rl.headline}: {rl.reason}" if rl.reason else rl.headline
        raise DataError(
            f"--steps: the RL run of {config.name} is not finished in {workspace.root} ({reason}); make it first, "
            "by luffy run with the same experiment and overrides"
        )
    kept = complete_checkpoints(rl.directory)
    missing = [step for step in steps if step not in kept]
    if missing:
        raise DataError(
            f"--steps: {rl.directory} has no checkpoint of {_words(missing)}; there are: {_words(sorted(kept))} "
            "(execution.checkpoint sets how many a run keeps)"
        )


def _words(steps: list[int]) -> str:
    return ", ".join(map(str, steps))

"""Runs an RL stage that is killed right before an optimizer step:
`killed_run.py METHOD UPDATE OUT DATA MODEL OVERRIDE...`.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_methods import TWO_UPDATES, experiment, run_rl

from luffy.config.experiment import ExperimentConfig
from luffy.objectives.schedules import StepObjective
from luffy.training.policy import Policy
from luffy.types import TrainBatch


def run_killed(config: ExperimentConfig, out: Path, upstream: dict[str, Path], update: int) -> None:
    """Run the stage; SIGKILL comes in place of optimizer step `update` (from 1)."""
    take, left = Policy.update, iter(range(update - 1))

    def take_or_die(policy: Policy, batch: TrainBatch, objective: StepObjective, lr: float) -> dict[str, float]:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(policy, batch, objective, lr)

    Policy.update = take_or_die  # type: ignore[method-assign]
    run_rl(config, out, upstream)


if __name__ == "__main__":
    method, update, out, data, model, *overrides = sys.argv[1:]
    config = experiment(method, *TWO_UPDATES, *overrides)
    run_killed(config, Path(out), {"data": Path(data), "model": Path(model), "held_out": Path(data)}, int(update))

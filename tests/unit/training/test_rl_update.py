"""The learning half of an RL step against the float64 reference: two updates, each on its own groups and rate."""

import copy

import pytest
import torch
from reference.gradient_case import (
    MAX_RESPONSE_TOKENS,
    OPTIMIZER,
    ROOT,
    adamw_step,
    execution,
    reference_optimizer,
    reference_rows,
    relative_l2,
    tiny_model,
    trajectories,
)
from reference.losses import REFERENCES, ReferenceRow, forward

from luffy.config import load_experiment
from luffy.config.objective import ObjectiveConfig
from luffy.config.training import RLConfig, ScheduleConfig
from luffy.training.policy import Policy
from luffy.training.rl_update import learn
from luffy.types import Group

RL = RLConfig(
    steps=2,
    prompts_per_step=4,
    prompts_per_update=2,
    max_response_tokens=MAX_RESPONSE_TOKENS,
    optimizer=OPTIMIZER.model_copy(update={"schedule": ScheduleConfig(kind="linear", final_share=0.1)}),
)
# Four updates in all fall linearly from 1 to 0.1; the second RL step makes the last two.
RATES = (0.4 * OPTIMIZER.lr, 0.1 * OPTIMIZER.lr)


def _objective(preset: str) -> ObjectiveConfig:
    objective = load_experiment(ROOT / "exp_configs/smoke.yaml", [f"method={preset}"]).objective
    assert objective is not None
    return objective


@pytest.mark.parametrize("preset", ["luffy", "on_policy", "rl_sft_loss"])
def test_two_updates_equal_the_reference(preset: str) -> None:
    model = tiny_model()
    rows, index = trajectories(preset, num_groups=4)
    groups = [Group(str(g), tuple(rows[4 * g : 4 * g + 4])) for g in range(4)]
    policy = Policy(copy.deepcopy(model), RL.optimizer, execution(), "float32")
    metrics = learn(policy, groups, _objective(preset), RL, step=2, pad_id=0)

    model64 = copy.deepcopy(model).double()
    optimizer = reference_optimizer(model64)
    with torch.no_grad():  # logp_old: before the first of the two updates
        old = [
            forward(model64, ReferenceRow(r.prompt_ids, r.response_ids, False, 0.0, torch.zeros(0))).logp for r in rows
        ]
    for half, rate in zip((slice(0, 8), slice(8, 16)), RATES, strict=True):
        written = reference_rows(preset, rows[half], index[half], old[half])
        REFERENCES[preset]([forward(model64, row) for row in written]).backward()
        adamw_step(model64, optimizer, rate)
    found = {name: parameter.detach() for name, parameter in policy.causal_lm.named_parameters()}
    start = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    expected = {name: parameter.detach() for name, parameter in model64.named_parameters()}
    moved = {name: found[name].double() - start[name] for name in start}
    assert relative_l2(moved, {name: expected[name] - start[name] for name in start}) < 3e-3
    assert metrics["actor/lr"] == pytest.approx(sum(RATES) / 2)


def test_silent_groups_are_counted_by_their_advantages() -> None:
    rows, _ = trajectories("rl_sft_loss", num_groups=4)
    failed = [Group(str(g), tuple(_with_reward(row) for row in rows[4 * g : 4 * g + 4])) for g in range(4)]
    policy = Policy(tiny_model(), RL.optimizer, execution(), "float32")
    metrics = learn(policy, failed, _objective("rl_sft_loss"), RL, step=1, pad_id=0)
    assert metrics["batch/zero_advantage_share"] == 1.0  # the demonstration's reward stands outside


def _with_reward(row):
    return type(row)(
        row.prompt_ids, row.response_ids, row.source, row.logp_behavior, row.weight_version,
        1.0 if row.is_off_policy else 0.0, row.outcome, row.finish_reason,
    )  # fmt: skip

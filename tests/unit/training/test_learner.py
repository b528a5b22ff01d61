"""The learning half of an RL step against the float64 reference: two updates, each on its own groups and rate."""

import copy
import dataclasses

import pytest
import torch
from reference.gradient_case import (
    MAX_RESPONSE_TOKENS,
    OPTIMIZER,
    adamw_step,
    as_groups,
    execution,
    objective_of,
    reference_of,
    reference_optimizer,
    reference_rows,
    relative_l2,
    terms_of,
    tiny_model,
    trajectories,
)
from reference.losses import forward
from reference.rows import evaluate
from reference.variants import STEP, TOTAL_STEPS

from luffy.config import available_presets
from luffy.config.objective import ObjectiveConfig
from luffy.config.training import CriticConfig, OptimizerConfig, RLConfig, ScheduleConfig
from luffy.objectives.schedules import schedule_multiplier
from luffy.training.critic import Critic
from luffy.training.frozen_policy import FrozenPolicy
from luffy.training.learner import Learner
from luffy.training.policy import Policy
from luffy.types import Outcome

NUM_GROUPS = 5
SCHEDULE = ScheduleConfig(kind="linear", final_share=0.1)
RL = RLConfig(
    steps=TOTAL_STEPS,
    prompts_per_step=NUM_GROUPS + 1,
    prompts_per_update=3,
    max_response_tokens=MAX_RESPONSE_TOKENS,
    optimizer=OPTIMIZER.model_copy(update={"schedule": SCHEDULE}),
)
# A filter may leave five groups of six: the first update takes two of them, the second three.
CUT = 2
METHODS = [name for name in available_presets("methods") if name not in ("sft", "dft", "ppo")]


def _objective(preset: str) -> ObjectiveConfig:
    objective = objective_of(preset)
    assert objective is not None
    return objective


def _rate(update: int) -> float:
    return OPTIMIZER.lr * schedule_multiplier(SCHEDULE, (STEP - 1) * 2 + update, TOTAL_STEPS * 2)


@pytest.mark.parametrize("preset", METHODS)
def test_two_updates_equal_the_reference(preset: str) -> None:
    model = tiny_model()
    rows, index = trajectories(preset, num_groups=NUM_GROUPS)
    objective = _objective(preset)
    reference = FrozenPolicy(tiny_model(seed=1), execution(), 1.0) if objective.needs_reference else None
    policy = Policy(copy.deepcopy(model), RL.optimizer, execution(), "float32")
    metrics = Learner(policy, objective, RL, pad_id=0, reference=reference).learn(as_groups(rows, index), STEP)

    model64 = copy.deepcopy(model).double()
    optimizer = reference_optimizer(model64)
    with torch.no_grad():  # before the first of the two updates
        old = [evaluate(model64, row)[0] for row in rows]
        start = [evaluate(tiny_model(seed=1).double(), row)[0] for row in rows]
    written = reference_rows(preset, rows, index, old, start)
    for update, part in enumerate((slice(0, 4 * CUT), slice(4 * CUT, None))):
        reference_of(preset)([forward(model64, row) for row in written[part]]).backward()
        adamw_step(model64, optimizer, _rate(update))
    found = {name: parameter.detach() for name, parameter in policy.causal_lm.named_parameters()}
    first = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    moved = {name: found[name].double() - first[name] for name in first}
    expected = {name: parameter.detach() - first[name] for name, parameter in model64.named_parameters()}
    assert relative_l2(moved, expected) < 3e-3
    assert metrics["actor/lr"] == pytest.approx((_rate(0) + _rate(1)) / 2)


def test_silent_groups_are_counted_by_their_advantages() -> None:
    rows, index = trajectories("rl_sft_loss", num_groups=NUM_GROUPS)
    failed = [row if row.is_off_policy else dataclasses.replace(row, reward=0.0, outcome=Outcome.WRONG) for row in rows]
    policy = Policy(tiny_model(), RL.optimizer, execution(), "float32")
    metrics = Learner(policy, _objective("rl_sft_loss"), RL, pad_id=0).learn(as_groups(failed, index), STEP)
    assert metrics["batch/zero_advantage_share"] == 1.0  # the demonstration's reward stands outside


def test_no_group_is_no_update() -> None:
    policy = Policy(tiny_model(), RL.optimizer, execution(), "float32")
    before = copy.deepcopy(policy.causal_lm.state_dict())
    assert Learner(policy, _objective("dapo"), RL, pad_id=0).learn([], STEP) == {}
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.causal_lm.state_dict().items())


def test_a_critic_that_warms_up_learns_alone() -> None:
    rows, index = trajectories("ppo", num_groups=NUM_GROUPS)
    config = CriticConfig(optimizer=OptimizerConfig(lr=0.05), warmup_steps=STEP)
    rl = RL.model_copy(update={"critic": config})
    policy = Policy(tiny_model(), rl.optimizer, execution(), "float32")
    critic = Critic(tiny_model(), config, execution(), "float32")
    learner = Learner(policy, _objective("ppo"), rl, pad_id=0, critic=critic)
    before = copy.deepcopy(policy.causal_lm.state_dict())
    metrics = learner.learn(as_groups(rows, index), STEP)
    assert metrics["critic/loss"] > 0 and "actor/loss" not in metrics
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.causal_lm.state_dict().items())
    assert "actor/loss" in learner.learn(as_groups(rows, index), STEP + 1)


def test_the_critic_predicts_what_it_has_seen() -> None:
    rows, index = trajectories("ppo", num_groups=NUM_GROUPS)
    config = CriticConfig(optimizer=OptimizerConfig(lr=0.02, weight_decay=0.0), value_clip=None, warmup_steps=100)
    rl = RL.model_copy(update={"critic": config, "steps": 60})
    policy = Policy(tiny_model(), rl.optimizer, execution(), "float32")
    learner = Learner(policy, _objective("ppo"), rl, 0, Critic(tiny_model(), config, execution(), "float32"))
    history = [learner.learn(as_groups(rows, index), step) for step in range(1, 41)]
    assert history[-1]["critic/explained_variance"] > 0.5 > history[0]["critic/explained_variance"]


def test_an_adaptive_coefficient_climbs_while_entropy_is_below_its_target() -> None:
    objective = ObjectiveConfig.model_validate_json(
        """{"group": {"size": 4, "off_policy": 0},
            "advantage": {"kind": "group_mean", "population": "joint", "scale_by_std": false},
            "terms": [
              {"name": "on_policy", "select": "on_policy", "loss": {"kind": "surrogate"},
               "normaliser": {"mode": "token", "population": "joint"}},
              {"name": "entropy", "select": "on_policy", "loss": {"kind": "entropy"},
               "coefficient": {"kind": "adaptive", "start": 0.01, "target": 5.0, "rate": 0.1},
               "normaliser": {"mode": "token", "population": "own"}}]}"""
    )
    rows, index = trajectories("on_policy", num_groups=NUM_GROUPS)
    policy = Policy(tiny_model(), RL.optimizer, execution(), "float32")
    learner = Learner(policy, objective, RL, pad_id=0)
    first = learner.learn(as_groups(rows, index), 1)
    second = learner.learn(as_groups(rows, index), 2)
    # log(23) nats is the most this vocabulary can have, so the target is out of reach.
    assert second["actor/entropy_coefficient"] > first["actor/entropy_coefficient"] > 0.01
    again = Learner(policy, objective, RL, pad_id=0)
    again.restore(learner.state())
    assert again.state() == learner.state() != {"entropy": 0.01}


def test_an_interleaved_step_learns_the_traces() -> None:
    rows, _ = trajectories("sft", num_groups=2)
    policy = Policy(tiny_model(), RL.optimizer, execution(), "float32")
    learner = Learner(policy, _objective("relift"), RL, pad_id=0)
    losses = [learner.imitate(rows, step)["actor/interleaved_loss"] for step in (1, 2, 3)]
    assert losses[2] < losses[1] < losses[0]
    assert [term.name for term in terms_of("relift_sft")] == ["sft", "sft_entropy"]

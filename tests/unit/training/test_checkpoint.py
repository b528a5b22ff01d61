"""Checkpoints: complete or not there, newest kept, and what is resumed is the same again."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from reference.gradient_case import execution, tiny_model
from reference.value_case import at_tokens, batch, config, targets

from luffy.config.training import OptimizerConfig, SFTConfig
from luffy.errors import CheckpointError, ConfigError
from luffy.files import link_or_copy
from luffy.objectives.step import objective_at
from luffy.training.checkpoint import CheckpointStore
from luffy.training.critic import Critic
from luffy.training.policy import Policy

OPTIMIZER = OptimizerConfig(lr=1e-2)


def _policy(seed: int = 0, zero_stage: int = 0) -> Policy:
    return Policy(tiny_model(seed), OPTIMIZER, execution(zero_stage=zero_stage), "float32")


def _critic(seed: int = 0, zero_stage: int = 0) -> Critic:
    return Critic(tiny_model(seed), config(0.2), execution(zero_stage=zero_stage), "float32")


def _step(policy: Policy, critic: Critic | None = None) -> None:
    rows = batch()
    rows.is_off_policy_BT = rows.response_mask_BT
    terms = SFTConfig(epochs=1, batch_size=1, optimizer=OPTIMIZER).objective.terms
    policy.update(rows, objective_at(terms, 1, 1, rows.input_ids_BT.shape[1]), 1e-2)
    if critic is not None:
        critic.update(rows, critic.values(rows), at_tokens(targets().returns, rows), 0.1)


def _weights(*trained: Policy | Critic) -> list[torch.Tensor]:
    return [parameter.detach().clone() for part in trained for parameter in part.engine.module.parameters()]


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_resumed_policy_and_critic_continue_bit_for_bit(zero_stage: int, tmp_path: Path) -> None:
    store, policy, critic = CheckpointStore(tmp_path, keep=2), _policy(zero_stage=zero_stage), _critic(0, zero_stage)
    _step(policy, critic)
    store.save({"policy": policy.engine, "critic": critic.engine}, 1)
    _step(policy, critic)
    expected = policy.logprobs(batch()), critic.values(batch())
    policy, critic = _policy(9, zero_stage), _critic(9, zero_stage)
    assert store.load({"policy": policy.engine, "critic": critic.engine}, 1) == {}
    _step(policy, critic)
    assert torch.equal(policy.logprobs(batch()), expected[0])
    assert torch.equal(critic.values(batch()), expected[1])


def test_a_critic_beside_it_does_not_change_the_policy() -> None:
    alone, beside, critic = _policy(), _policy(), _critic()
    for _ in range(2):
        _step(alone)
        _step(beside, critic)
    assert all(torch.equal(a, b) for a, b in zip(_weights(alone), _weights(beside), strict=True))


def test_the_state_of_the_stage_comes_back_exactly(tmp_path: Path) -> None:
    store, policy = CheckpointStore(tmp_path, keep=1), _policy()
    state = {"controller": 0.1 + 0.2, "replay": {"uid": [{"ids": [3, 1], "logp": [-1e-17, -math.pi]}]}, "none": None}
    store.save({"policy": policy.engine}, 7, state)
    assert store.load({"policy": policy.engine}, 7) == state


@pytest.mark.parametrize("value", [math.nan, math.inf, (1, 2), {3: "three"}, {1}], ids=str)
def test_a_state_that_would_not_come_back_is_refused(value: object, tmp_path: Path) -> None:
    store, policy = CheckpointStore(tmp_path, keep=1), _policy()
    with pytest.raises(AssertionError, match="state 'replay' must be plain JSON"):
        store.save({"policy": policy.engine}, 1, {"replay": value})
    assert store.newest() is None


def test_only_the_newest_stay_and_an_incomplete_one_never_counts(tmp_path: Path) -> None:
    store, engines = CheckpointStore(tmp_path, keep=2), {"policy": _policy().engine}
    assert store.newest() is None
    for step in (10, 20, 30):
        store.save(engines, step)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_000020", "step_000030"]
    (folder / "step_000030" / "COMPLETE").unlink()
    assert store.newest() == 20
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        store.load(engines, 30)


def test_another_zero_stage_is_refused_in_one_line(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save({"policy": _policy().engine}, 3)
    with pytest.raises(ConfigError, match=r"zero_stage 0, ranks 1, .*this run has zero_stage 2, ranks 1"):
        store.load({"policy": _policy(zero_stage=2).engine}, 3)


def test_other_engines_are_refused_in_one_line(tmp_path: Path) -> None:
    store, policy = CheckpointStore(tmp_path, keep=1), _policy()
    store.save({"policy": policy.engine}, 3)
    with pytest.raises(ConfigError, match=r"with .*engines policy, this run has .*engines critic and policy"):
        store.load({"policy": policy.engine, "critic": _critic().engine}, 3)


def test_a_checkpoint_linked_elsewhere_outlives_the_original(tmp_path: Path) -> None:
    """A longer run takes the checkpoint of a shorter one over, whose own goes on writing."""
    short, policy = CheckpointStore(tmp_path / "short", keep=1), _policy()
    engines = {"policy": policy.engine}
    short.save(engines, 5, {"seen": [1]})
    expected = _weights(policy)
    taken = tmp_path / "long" / "checkpoints" / "step_000005"
    shutil.copytree(tmp_path / "short" / "checkpoints" / "step_000005", taken, copy_function=link_or_copy)
    _step(policy)
    short.save(engines, 5, {"seen": [2]})
    long = CheckpointStore(tmp_path / "long", keep=1)
    assert long.newest() == 5
    assert long.load(engines, 5) == {"seen": [1]}
    assert all(torch.equal(a, b) for a, b in zip(_weights(policy), expected, strict=True))

"""A reference that follows the policy: its rule in float64, which one each step compares with, and its checkpoint."""

from pathlib import Path

import pytest
import torch
from reference.gradient_case import execution, tiny_model, trajectories
from reference.learner_case import NUM_GROUPS, RL, objective, shard_of
from torch import Tensor

from luffy.config.training import MovingReferenceConfig
from luffy.errors import CheckpointError, ConfigError
from luffy.training.checkpoint import CheckpointStore
from luffy.training.learner import Learner
from luffy.training.policy import FrozenPolicy, MovingReference, Policy
from luffy.types import TrainBatch

Weights = dict[str, Tensor]


class SeenReferences:
    """A moving reference that notes its weights whenever it scores a batch."""

    def __init__(self, reference: MovingReference) -> None:
        self.reference = reference
        self.seen: list[Weights] = []

    def logprobs(self, batch: TrainBatch) -> Tensor:
        self.seen.append(weights_of(self.reference))
        return self.reference.logprobs(batch)


def weights_of(reference: MovingReference) -> Weights:
    return {name: weight.clone() for name, weight in reference._parameters.items()}


def opened(every: int, mixup: float, zero_stage: int = 0) -> tuple[Policy, MovingReference]:
    where = execution(zero_stage=zero_stage)
    policy = Policy(tiny_model(), RL.optimizer, where, "float32")
    config = MovingReferenceConfig(refresh_every=every, mixup=mixup)
    return policy, MovingReference(policy, FrozenPolicy(tiny_model(), where, 1.0), config)


def run(policy: Policy, reference: MovingReference, steps: range) -> tuple[list[Weights], list[Weights]]:
    """Policies after each step, and the references that its KL term was computed with."""
    rows, index = trajectories("uft", num_groups=NUM_GROUPS)
    watched = SeenReferences(reference)
    learner = Learner(policy, objective("uft"), RL, pad_id=0, reference=watched)
    policies = []
    for step in steps:
        learner.learn(shard_of(rows, index, "uft"), step)
        reference.follow(step)
        policies.append(dict(policy.weights()))
    return policies, watched.seen


def assert_close(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name].double(), expected[name].double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_the_kl_of_a_step_is_against_the_policy_after_the_last_refresh(zero_stage: int) -> None:
    policy, reference = opened(every=2, mixup=1.0, zero_stage=zero_stage)
    start = dict(policy.weights())
    policies, seen = run(policy, reference, range(1, 6))
    expected = [start, start, policies[1], policies[1], policies[3]]
    for found, wanted in zip(seen, expected, strict=True):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(not torch.equal(start[name], policies[1][name]) for name in start)


@pytest.mark.parametrize("every", [1, 3])
def test_the_moving_average_equals_its_rule_in_float64(every: int) -> None:
    policy, reference = opened(every, mixup=0.25)
    average = {name: weight.double() for name, weight in policy.weights()}
    policies, seen = run(policy, reference, range(1, 8))
    for step, after in enumerate(policies, start=1):
        assert_close(seen[step - 1], average)
        if step % every == 0:
            average = {name: 0.25 * after[name].double() + 0.75 * average[name] for name in average}
    assert_close(weights_of(reference), average)


def test_an_average_in_bfloat16_keeps_shares_that_its_model_would_round_away() -> None:
    where = execution(zero_stage=1)
    policy = Policy(tiny_model(seed=1).bfloat16(), RL.optimizer, where, "bfloat16")
    config = MovingReferenceConfig(refresh_every=1, mixup=1e-3)
    reference = MovingReference(policy, FrozenPolicy(tiny_model().bfloat16(), where, 1.0), config)
    start, target = weights_of(reference), dict(policy.weights())
    for step in range(1, 201):
        reference.follow(step)
    left = 0.999**200
    for name, average in reference.state.items():
        wanted = (1 - left) * target[name].double() + left * start[name].double()
        torch.testing.assert_close(average.double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mixup", [1.0, 0.25])
def test_a_restored_reference_goes_on_bit_for_bit(mixup: float, tmp_path: Path) -> None:
    store, (policy, reference) = CheckpointStore(tmp_path, keep=2), opened(2, mixup)
    run(policy, reference, range(1, 4))
    store.save({"policy": policy.engine}, 3, {}, {"reference": reference.state})
    _, expected = run(policy, reference, range(4, 7))
    policy, reference = opened(2, mixup)
    store.load({"policy": policy.engine}, 3, {"reference": reference.state})
    reference.publish()
    _, found = run(policy, reference, range(4, 7))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_checkpoint_without_the_reference_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    store, (policy, reference) = CheckpointStore(tmp_path, keep=2), opened(2, 1.0)
    engines, frozen = {"policy": policy.engine}, {"reference": reference.state}
    store.save(engines, 1)
    with pytest.raises(ConfigError, match=r"this run has .*policy and reference"):
        store.load(engines, 1, frozen)
    store.save(engines, 2, {}, frozen)
    (file,) = (tmp_path / "checkpoints/step_000002/reference").glob("*.safetensors")
    file.unlink()
    with pytest.raises(CheckpointError, match="reference does not hold the parameters"):
        store.load(engines, 2, frozen)

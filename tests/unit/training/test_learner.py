"""The learning half of an RL step against the float64 reference, and a reference that follows the policy."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from reference.gradient_case import execution, terms_of, tiny_model, trajectories
from reference.learner_case import METHODS, NUM_GROUPS, RL, make_learner, objective, rate, shard_of, two_updates
from reference.rows import STEP
from safetensors.torch import load_file
from support.refusals import refused
from synthetic.settings import rl_settings
from torch import Tensor

from luffy.config.training import CriticConfig, MovingReferenceConfig, OptimizerConfig, RLConfig
from luffy.errors import CheckpointError, ConfigError
from luffy.training import update_metrics
from luffy.training.batching import Shard, shard_rows
from luffy.training.checkpoint import CheckpointStore
from luffy.training.critic import Critic
from luffy.training.learner import Learner, TrainerSpec
from luffy.training.policy import FrozenPolicy, MovingReference, Policy
from luffy.training.update_metrics import PartTimes
from luffy.types import Outcome, TrainBatch


@pytest.mark.parametrize(("preset", "passes"), [*((preset, 1) for preset in METHODS), ("dapo", 3), ("uft", 3)])
def test_passes_over_two_mini_batches_equal_the_reference(preset: str, passes: int) -> None:
    """The policy of each ratio's denominator is that before the first optimizer step."""
    error, metrics = two_updates(preset, passes=passes)
    assert error < 1e-4
    rates = [rate(update, passes) for update in range(2 * passes)]
    assert metrics["actor/lr"] == pytest.approx(sum(rates) / len(rates))


def test_silent_groups_are_counted_by_their_advantages() -> None:
    rows, index = trajectories("rl_sft_loss", num_groups=NUM_GROUPS)
    failed = [row if row.is_off_policy else dataclasses.replace(row, reward=0.0, outcome=Outcome.WRONG) for row in rows]
    metrics = make_learner("rl_sft_loss").learn(shard_of(failed, index, "rl_sft_loss"), STEP)
    assert metrics["batch/zero_advantage_share"] == 1.0  # the demonstration's reward stands outside


@pytest.mark.parametrize(
    ("preset", "passes", "num_forward"), [("rl_sft_loss", 1, 4), ("uft", 1, 5), ("rl_sft_loss", 3, 10)]
)
def test_what_a_step_computes_is_counted_pass_by_pass(preset: str, passes: int, num_forward: int, monkeypatch) -> None:
    """Two updates: forward and backward of all rows (3 in each pass of RL over them), the old policy's forward pass
    (1), a reference's (1)."""
    rows, index = trajectories(preset, num_groups=NUM_GROUPS)
    learner, counted = make_learner(preset, passes), []
    monkeypatch.setattr(PartTimes, "count", lambda times, flops: counted.append(flops))
    learner.learn(shard_of(rows, index, preset, passes=passes), STEP)
    flops = learner.policy.flops
    assert flops is not None
    once = flops.forward([row.num_tokens for row in rows], sum(row.num_learnable for row in rows))
    assert counted == [pytest.approx(num_forward * once)]


def test_no_group_is_no_update() -> None:
    learner = make_learner("dapo")
    before = copy.deepcopy(learner.policy.causal_lm.state_dict())
    assert learner.learn(Shard((), (), (), (), (), ()), STEP) == {}
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.policy.causal_lm.state_dict().items())


def with_critic(rl: RLConfig) -> tuple[Policy, Learner]:
    policy = Policy(tiny_model(), rl.optimizer, execution(), "float32")
    critic = Critic(tiny_model(), rl.critic, execution(), "float32")
    return policy, Learner(policy, objective("ppo"), rl, pad_id=0, critic=critic)


def test_a_critic_that_warms_up_learns_alone() -> None:
    rows, index = trajectories("ppo", num_groups=NUM_GROUPS)
    config = CriticConfig(optimizer=OptimizerConfig(lr=0.05), warmup_steps=STEP)
    rl = RL.model_copy(update={"critic": config})
    policy, learner = with_critic(rl)
    before = copy.deepcopy(policy.causal_lm.state_dict())
    metrics = learner.learn(shard_of(rows, index, "ppo"), STEP)
    assert metrics["critic/loss"] > 0 and "actor/loss" not in metrics
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.causal_lm.state_dict().items())
    assert "actor/loss" in learner.learn(shard_of(rows, index, "ppo"), STEP + 1)


def test_the_critic_predicts_what_it_has_seen() -> None:
    rows, index = trajectories("ppo", num_groups=NUM_GROUPS)
    config = CriticConfig(optimizer=OptimizerConfig(lr=0.02, weight_decay=0.0), value_clip=None, warmup_steps=100)
    rl = RL.model_copy(update={"critic": config, "steps": 60})
    _, learner = with_critic(rl)
    history = [learner.learn(shard_of(rows, index, "ppo"), step) for step in range(1, 41)]
    assert history[-1]["critic/explained_variance"] > 0.5 > history[0]["critic/explained_variance"]


def test_an_interleaved_step_learns_the_traces() -> None:
    rows, _ = trajectories("sft", num_groups=2)
    learner = make_learner("relift")
    (shard,) = shard_rows(rows, num_ranks=1)
    losses = [learner.sft_step(shard, step)["actor/interleaved_loss"] for step in (1, 2, 3)]
    assert losses[2] < losses[1] < losses[0]
    assert [term.name for term in terms_of("relift_sft")] == ["sft", "sft_entropy"]


def test_an_sft_step_between_rl_steps_has_its_dropout_whatever_was_drawn_before(tmp_path: Path) -> None:
    settings = rl_settings("chain=rl", "method=relift", "sft.optimizer.lr=1e-2")
    model = tiny_model()
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path / "model")
    (shard,) = shard_rows(trajectories("sft")[0], 1)
    for drawn in (1, 2):
        rank = TrainerSpec(settings, execution(), tmp_path / "model", tmp_path, longest=32, pad_id=0).open_rank()
        torch.manual_seed(drawn)
        rank.sft_step(shard, 1)
        rank.export(tmp_path / str(drawn))
    one, other, start = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "2", "model"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], start[name]) for name in one)


def test_mfu_is_the_share_of_a_known_peak_over_all_parts_each_of_which_is_added_up(monkeypatch) -> None:
    times, seen = PartTimes(), [0.0]
    for _ in range(2):
        with times.part("update"):
            pass
        seen.append(times.seconds["update"])
    assert seen[2] > seen[1] > 0
    times.seconds = {"logp_old": 1.0, "update": 2.0}
    seconds = {"perf/logp_old_s": 1.0, "perf/update_s": 2.0}
    assert times.metrics() == seconds  # a model that is not counted
    times.count(6e12)
    assert times.metrics() == seconds | {"perf/model_tflops": pytest.approx(2.0)}
    monkeypatch.setattr(update_metrics, "device_peak", lambda: 8e12)
    assert times.metrics()["perf/mfu"] == pytest.approx(0.25)


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
    with refused("policy and reference", error=ConfigError):
        store.load(engines, 1, frozen)
    store.save(engines, 2, {}, frozen)
    (file,) = (tmp_path / "checkpoints/step_000002/reference").glob("*.safetensors")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"reference.*parameters"):
        store.load(engines, 2, frozen)

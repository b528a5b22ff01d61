"""The learning half of an RL step against the float64 reference, its rank, and how long its parts take."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from reference.gradient_case import execution, terms_of, tiny_model, trajectories
from reference.learner_case import METHODS, NUM_GROUPS, RL, make_learner, objective, rate, shard_of, two_updates
from reference.rows import STEP
from safetensors.torch import load_file
from synthetic.settings import rl_settings

from luffy.config.objective import ObjectiveConfig
from luffy.config.training import CriticConfig, OptimizerConfig, RLConfig
from luffy.training import update_metrics
from luffy.training.batching import Shard, shard_rows
from luffy.training.critic import Critic
from luffy.training.learner import Learner, TrainerSpec
from luffy.training.policy import Policy
from luffy.training.update_metrics import PartTimes
from luffy.types import Outcome


@pytest.mark.parametrize("preset", METHODS)
def test_two_updates_equal_the_reference(preset: str) -> None:
    error, metrics = two_updates(preset)
    assert error < 1e-4
    assert metrics["actor/lr"] == pytest.approx((rate(0) + rate(1)) / 2)


@pytest.mark.parametrize("preset", ["dapo", "uft"])
def test_three_passes_over_two_mini_batches_equal_the_reference(preset: str) -> None:
    """The policy of each ratio's denominator is that before the first of the six optimizer steps."""
    error, metrics = two_updates(preset, passes=3)
    assert error < 1e-4
    assert metrics["actor/lr"] == pytest.approx(sum(rate(update, passes=3) for update in range(6)) / 6)


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
    first = learner.learn(shard_of(rows, index, "on_policy"), 1)
    second = learner.learn(shard_of(rows, index, "on_policy"), 2)
    # log(23) nats is the most this vocabulary can have, so the target is out of reach.
    assert second["actor/entropy_coefficient"] > first["actor/entropy_coefficient"] > 0.01
    again = Learner(policy, objective, RL, pad_id=0)
    again.restore(learner.state())
    assert again.state() == learner.state() != {"entropy": 0.01}


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


def times_of(flops: float, **seconds: float) -> PartTimes:
    times = PartTimes()
    times.count(flops)
    times.seconds = dict(seconds)
    return times


def test_a_part_that_comes_twice_is_added_up() -> None:
    times = PartTimes()
    with times.part("update"):
        pass
    first = times.seconds["update"]
    with times.part("update"):
        pass
    assert times.seconds["update"] > first > 0


def test_mfu_is_the_share_of_a_known_peak_over_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"perf/logp_old_s": 1.0, "perf/update_s": 2.0, "perf/model_tflops": pytest.approx(2.0)}
    assert times_of(6e12, logp_old=1.0, update=2.0).metrics() == metrics
    assert times_of(0.0, update=2.0).metrics() == {"perf/update_s": 2.0}  # a model that is not counted
    monkeypatch.setattr(update_metrics, "device_peak", lambda: 8e12)
    assert times_of(6e12, logp_old=1.0, update=2.0).metrics()["perf/mfu"] == pytest.approx(0.25)

"""RL and SFT steps against float64 references: the policy, the critic, a reference that follows; counted operations."""

import contextlib
import copy
import functools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reference.gradient_case import (
    SPLITS,
    adamw_step,
    execution,
    reference_optimizer,
    reference_rows,
    relative_l2,
    terms_of,
    tiny_model,
    trajectories,
)
from reference.learner_case import METHODS, NUM_GROUPS, RL, make_learner, objective, rate, shard_of, two_updates
from reference.losses import REFERENCES, forward
from reference.ray_case import weights_in
from reference.rows import STEP, evaluate
from reference.sft_case import ENDS_AFTER, PHASED, PLAN, sft
from reference.value_case import at_tokens, batch, config, engine_steps, part_of, reference_steps, targets
from safetensors.torch import load_file
from support.refusals import refused
from synthetic.settings import rl_settings
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from luffy.config.model import LoRAConfig
from luffy.config.training import CriticConfig, MovingReferenceConfig, OptimizerConfig, RLConfig
from luffy.errors import CheckpointError, ConfigError, NumericalError
from luffy.tracking.metrics import without_times
from luffy.training import update_metrics
from luffy.training.batching import Shard, shard_rows, stream_indices
from luffy.training.checkpoint import CheckpointStore
from luffy.training.critic import Critic, value_loss
from luffy.training.learner import Learner, TeacherSpec, TrainerSpec
from luffy.training.policy import FrozenPolicy, MovingReference, Policy
from luffy.training.policy_model import Adapter, PolicyModel
from luffy.training.ranks import LocalRanks
from luffy.training.supervised import OnStep, SupervisedPlan, SupervisedRank, SupervisedTrainer
from luffy.training.update_metrics import ModelFlops, PartTimes, peak_flops
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
    failed = [row if row.is_off_policy else replace(row, reward=0.0, outcome=Outcome.WRONG) for row in rows]
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


def assert_close(found: Weights, expected: Weights, atol: float) -> None:
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name].double(), expected[name].double(), rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("every", "mixup", "zero_stage"), [(2, 1.0, 0), (2, 1.0, 2), (2, 1.0, 3), (1, 0.25, 0), (3, 0.25, 0)]
)
def test_the_kl_of_a_step_is_against_the_policy_after_the_last_refresh_or_their_average(every, mixup, zero_stage):
    """The rule in float64; a reference that begins anew from the policy has its bits."""
    policy, reference = opened(every, mixup, zero_stage)
    average = {name: weight.double() for name, weight in policy.weights()}
    policies, seen = run(policy, reference, range(1, 8))
    assert any(not torch.equal(policies[0][name], policies[-1][name]) for name in average)
    for after, used, step in zip(policies, seen, range(1, 8), strict=True):
        assert_close(used, average, atol=0 if mixup == 1 else 1e-6)
        if step % every == 0:
            average = {name: mixup * after[name].double() + (1 - mixup) * average[name] for name in average}
    assert_close(weights_of(reference), average, atol=0 if mixup == 1 else 1e-6)


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        ("weights: current", 1.0),
        ("weights: start", 0.0),
        ("weights: start, follows: {refresh_every: 1, mixup: 0.25}", 0.25),
    ],
)
def test_a_policy_that_teaches_itself_has_the_weights_of_its_setting(weights: str, share: float, tmp_path) -> None:
    """After an RL step: its own, those of the start, or so far on the way between them."""
    teacher = f"rl.teachers.self={{kind: self, shows: peer, {weights}}}"
    settings = rl_settings("chain=rl", "method=rlrt", teacher, "rl.optimizer.lr=1e-2")
    start, (rows, index) = tmp_path / "model", trajectories("rlrt", num_groups=NUM_GROUPS)
    tiny_model().save_pretrained(start)
    spec = TrainerSpec(
        settings, execution(), start, tmp_path, longest=64, pad_id=0, teachers={"self": TeacherSpec(start, 64)}
    )
    rank = spec.open_rank()
    rank.learn(shard_of(rows, index, "rlrt"), 1)
    rank.follow(1)
    (scorer,), wanted, scored = rank._learner.teachers.scorers, tiny_model(), batch()
    before = FrozenPolicy(tiny_model(), execution(), 1.0).logprobs(scored)
    for name, weight in rank.policy.weights():
        wanted.get_parameter(name).data.lerp_(weight, share)
    expected_BT = FrozenPolicy(wanted, execution(), 1.0).logprobs(scored)
    torch.testing.assert_close(scorer.model.logprobs(scored), expected_BT, rtol=0, atol=1e-5)
    assert (rank.policy.logprobs(scored) - before).abs().max() > 0.01


def test_an_average_in_bfloat16_keeps_shares_that_its_model_would_round_away() -> None:
    where = execution(zero_stage=1)
    policy = Policy(tiny_model(seed=1).bfloat16(), RL.optimizer, where, "bfloat16")
    config = MovingReferenceConfig(refresh_every=1, mixup=1e-3)
    reference = MovingReference(policy, FrozenPolicy(tiny_model().bfloat16(), where, 1.0), config)
    start, target, left = weights_of(reference), dict(policy.weights()), 0.999**200
    for step in range(1, 201):
        reference.follow(step)
    wanted = {name: (1 - left) * target[name].double() + left * start[name].double() for name in start}
    assert_close(dict(reference.state), wanted, atol=1e-4)


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


# ---- counted operations against those that torch counts while a real model runs ----

SHAPE = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
KINDS = {
    "qwen2 untied": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2 tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None}),
}
ROWS, LENGTH, PROMPT = 3, 120, 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["forward", "training", "adapter"])
def test_a_forward_pass_and_the_training_of_model_or_adapter_take_what_is_counted(kind, what):
    make, own = KINDS[kind]
    config = make(**SHAPE, **own)
    # torch counts no operations of its fused attention on a CPU.
    policy = PolicyModel(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), 1.0, 64)
    adapter = Adapter(policy.causal_lm, LoRAConfig(rank=4, alpha=8.0), seed=0) if what == "adapter" else None
    for weight in policy.causal_lm.parameters():
        if adapter and weight.requires_grad:
            torch.nn.init.normal_(weight)
    with FlopCounterMode(display=False) as counted, torch.set_grad_enabled(what != "forward"):
        position_BT = torch.arange(LENGTH).repeat(ROWS, 1)
        attention = {"attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.bool)}
        logp_BT = policy(position_BT % 300, position_BT, position_BT >= PROMPT, attention, "value")[0]
        if what != "forward":
            logp_BT.sum().backward()
    flops = ModelFlops.of_config(config.to_dict(), adapter.num_parameters if adapter else None)
    lengths, num_scored = [LENGTH] * ROWS, ROWS * (LENGTH - PROMPT)
    expected = flops.forward(lengths, num_scored)
    if what != "forward":  # the head's logits are computed again for its gradient
        expected = flops.training(lengths, num_scored) + 2 * 300 * 64 * num_scored
    if adapter:  # nobody needs the gradient of the lowest layer's input
        shape = flops.shape
        expected -= 2 * shape.hidden_size * (shape.attention_size + 2 * shape.kv_size) * ROWS * LENGTH
    assert counted.get_total_flops() == pytest.approx(expected, rel=0.01)


def test_a_kind_of_model_with_an_unknown_shape_is_not_counted():
    assert ModelFlops.of_config({"model_type": "gpt2"}) is None


PEAKS = {  # TFLOPS in bfloat16, by the name that torch gives
    **{"NVIDIA H200": 989.4, "NVIDIA H20": 148.0, "NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.0},
    **{"NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A10": 125.0, "NVIDIA L40S": 362.0},
    **dict.fromkeys(("NVIDIA A10G", "NVIDIA GeForce GTX 1080", "AMD Instinct MI300X", "")),
}


@pytest.mark.parametrize(("name", "tflops"), PEAKS.items())
def test_peaks_are_found_by_name(name, tflops):
    assert peak_flops(name) == (None if tflops is None else pytest.approx(tflops * 1e12))


# ---- the critic, however a step is cut up ----

TOLERANCE = 1e-5
OF_CRITIC = SPLITS | {"zero_2": {"micro_batch_tokens": 25, "zero_stage": 2}}


_model = functools.cache(tiny_model)
"""One for all splits, so that its reference is computed once."""


def _critic(value_clip: float | None = 0.2, **settings: object) -> Critic:
    return Critic(tiny_model(), config(value_clip), execution(**settings), "float32")


def _learn(critic: Critic, lr: float = 1.0) -> dict[str, float]:
    rows = batch()
    return critic.update(_with_targets(critic, rows, at_tokens(targets().returns, rows)), lr)


def _with_targets(critic: Critic, rows: TrainBatch, return_BT: torch.Tensor) -> TrainBatch:
    return replace(rows, value_old_BT=critic.values(rows), return_BT=return_BT)


@pytest.mark.parametrize("split", OF_CRITIC)
@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_gradient_and_parameters_equal_the_float64_reference_for_any_split(value_clip, split):
    expected_gradients, expected_parameters = reference_steps(_model(), value_clip)
    gradients, parameters, metrics = engine_steps(_model(), value_clip, slice(None), OF_CRITIC[split])
    for part in ("decoder.", "head."):
        assert relative_l2(part_of(gradients, part), part_of(expected_gradients, part)) < TOLERANCE, part
        assert relative_l2(part_of(parameters, part), part_of(expected_parameters, part)) < TOLERANCE, part
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in expected_gradients.values()))
    assert metrics["critic/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert (0.2 < metrics["critic/clip_fraction"] < 0.8) if value_clip else metrics["critic/clip_fraction"] == 0


def test_values_stand_at_response_tokens_only_and_know_the_tokens_before_their_own_alone() -> None:
    critic, rows = _critic(), batch()
    assert torch.equal(critic.values(rows), torch.zeros(rows.input_ids_BT.shape))
    _learn(critic)
    value_BT = critic.values(rows)
    assert torch.equal(value_BT != 0, rows.response_mask_BT)
    assert value_BT.dtype == torch.float32 and not value_BT.requires_grad
    before_T, place = value_BT[1], 6
    rows.input_ids_BT[1, place] += 1
    after_T = critic.values(rows)[1]
    assert torch.equal(before_T[: place + 1], after_T[: place + 1])
    assert (before_T[place + 1 :] != after_T[place + 1 :])[rows.response_mask_BT[1, place + 1 :]].all()


def test_metrics_are_those_of_the_whole_step() -> None:
    critic, rows = _critic(value_clip=None, micro_batch_tokens=20), batch()
    _learn(critic)
    values, returns = critic.values(rows)[rows.response_mask_BT].double(), torch.cat(targets().returns).double()
    metrics = _learn(critic)
    assert metrics["critic/loss"] == pytest.approx(float((values - returns).square().mean() / 2), rel=1e-6)
    assert metrics["critic/value_mean"] == pytest.approx(float(values.mean()), rel=1e-6)
    assert metrics["critic/return_mean"] == pytest.approx(float(returns.mean()), rel=1e-6)
    explained = 1 - (returns - values).var(unbiased=False) / returns.var(unbiased=False)
    assert metrics["critic/explained_variance"] == pytest.approx(float(explained), rel=1e-5)
    assert metrics["critic/lr"] == 1.0
    equal_BT = 0.1 * rows.response_mask_BT.float()
    assert "critic/explained_variance" not in critic.update(_with_targets(critic, rows, equal_BT), 0.1)


def test_the_clip_takes_the_worse_of_both_values() -> None:
    value, old, wanted = torch.tensor([0.5, 0.5, -0.3]), torch.zeros(3), torch.tensor([1.0, -1.0, 0.0])
    loss, is_clipped = value_loss(value, old, wanted, value_clip=0.2)
    # The first moved 0.5 towards its return, of which 0.2 count; the others moved away, and are held to all of it.
    assert loss.tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 1.5**2, 0.5 * 0.3**2])
    assert is_clipped.tolist() == [True, False, False]


def test_a_return_that_is_not_finite_leaves_the_weights_alone() -> None:
    critic, rows = _critic(), batch()
    return_BT = torch.where(rows.response_mask_BT, torch.inf, 0.0)
    start = {name: parameter.clone() for name, parameter in critic.engine.module.named_parameters()}
    with pytest.raises(NumericalError, match="critic's loss"):
        critic.update(_with_targets(critic, rows, return_BT), 0.1)
    assert all(torch.equal(parameter, start[name]) for name, parameter in critic.engine.module.named_parameters())


# ---- supervised training, and what a kill leaves ----

RATES = (1.0, 0.75, 0.5, 0.25)
"""Of the first step's."""


def trainer_of(policy: Policy, store: CheckpointStore, plan: SupervisedPlan = PLAN) -> SupervisedTrainer:
    return SupervisedTrainer(plan, LocalRanks(SupervisedRank(policy, plan, store, pad_id=0)))


@pytest.mark.parametrize(("preset", "plan"), [("sft", PLAN), ("psft", PHASED)])
def test_training_equals_the_reference_step_by_step(preset: str, plan: SupervisedPlan, tmp_path: Path) -> None:
    model, rows = tiny_model(), trajectories("sft")[0]
    policy = Policy(copy.deepcopy(model), plan.optimizer, execution(micro_batch_tokens=40), "float32")
    seen: list[dict[str, float]] = []
    trainer_of(policy, CheckpointStore(tmp_path, 1), plan).train(rows, 0, lambda _, metrics: seen.append(metrics))
    model64 = copy.deepcopy(model).double()
    optimizer = reference_optimizer(model64)
    for step, share in enumerate(RATES):
        chosen = [rows[i] for i in stream_indices(len(rows), step * PLAN.batch_size, PLAN.batch_size, PLAN.seed)]
        if step % plan.steps_per_phase == 0:
            old64 = copy.deepcopy(model64)
        with torch.no_grad():
            written = reference_rows(preset, chosen, range(len(chosen)), [evaluate(old64, row)[0] for row in chosen])
        loss = REFERENCES[preset]([forward(model64, row) for row in written])
        loss.backward()
        assert seen[step]["actor/loss"] == pytest.approx(float(loss), rel=1e-5)
        assert seen[step]["actor/lr"] == pytest.approx(share * plan.optimizer.lr)
        adamw_step(model64, optimizer, share * plan.optimizer.lr)
    found = {name: parameter.detach() for name, parameter in policy.causal_lm.named_parameters()}
    assert relative_l2(found, {name: p.detach() for name, p in model64.named_parameters()}) < 1e-5


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch takes is afterwards as before."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_deterministic_kernels_are_taken_before_training_and_give_the_same_bits_on_a_cpu(own_kernels, tmp_path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    usual, steps = (sft(tmp_path / "model", tmp_path / str(kind), deterministic=kind) for kind in (False, True))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert [without_times(step) for step in steps] == [without_times(step) for step in usual]
    one, other = (weights_in(tmp_path / str(kind) / "model") for kind in (False, True))
    assert all(weight.equal(other[name]) for name, weight in one.items())


def killed_at(step: int) -> OnStep:
    def told(at: int, metrics: dict[str, float]) -> bool:
        if at == step:
            raise KeyboardInterrupt
        return False

    return told


def test_a_step_is_told_before_its_checkpoint_counts(tmp_path: Path) -> None:
    """Killed between the two, a resumed run tells the step again; the other way round it would never be told."""
    store, policy = CheckpointStore(tmp_path, 1), Policy(tiny_model(), PLAN.optimizer, execution(), "float32")
    with pytest.raises(KeyboardInterrupt):
        trainer_of(policy, store).train(trajectories("sft")[0], 0, killed_at(2))
    assert store.newest() is None


def test_a_phase_that_was_cut_off_is_taken_again_to_the_same_bits(tmp_path: Path) -> None:
    """Killed after step 3 of phases of two: the newest checkpoint is step 2's, although each step is due for one."""
    plan, rows = replace(PHASED, checkpoint_every=1), trajectories("sft")[0]
    weights = []
    for name, start, ends in (("whole", 0, False), ("cut", 0, True), ("cut", ENDS_AFTER - 1, False)):
        store = CheckpointStore(tmp_path / name, 1)
        policy = Policy(tiny_model(), plan.optimizer, execution(), "float32")
        with pytest.raises(KeyboardInterrupt) if ends else contextlib.nullcontext():
            trainer_of(policy, store, plan).train(rows, start, killed_at(ENDS_AFTER if ends else 0))
        assert not ends or store.newest() == ENDS_AFTER - 1
        weights.append([parameter.detach().clone() for parameter in policy.causal_lm.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(weights[0], weights[2], strict=True))

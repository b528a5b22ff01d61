"""The policy's own numbers: log-probabilities, entropies, memory layout, export."""

import dataclasses

import pytest
import torch
from reference.gradient_case import CASES, OPTIMIZER, execution, make_batch, step_of, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM

from luffy.config.model import DType
from luffy.config.training import OptimizerConfig
from luffy.errors import ConfigError, DataError, NumericalError
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training import policy_model, ranks, update_metrics
from luffy.training.policy import Policy, check_fits


def _policy(optimizer: OptimizerConfig = OPTIMIZER, **settings: object) -> Policy:
    return Policy(tiny_model(), optimizer, execution(**settings), "float32")


def test_clipped_tokens_are_reported() -> None:
    batch = make_batch("on_policy", tiny_model())
    metrics = _policy().accumulate(batch, step_of("on_policy"))
    ratio_BT = (_policy().logprobs(batch) - batch.logp_old_BT).exp()
    high = (ratio_BT > 1.2) & (batch.advantage_BT > 0)
    low = (ratio_BT < 0.8) & (batch.advantage_BT < 0)
    share = ((high | low) & batch.response_mask_BT).sum() / batch.response_mask_BT.sum()
    assert metrics["actor/clip_fraction"] == pytest.approx(float(share), abs=1e-6)
    assert 0 < metrics["actor/clip_fraction"] < 1


def test_the_largest_gap_to_the_sampler_is_reported_to_a_tenth() -> None:
    batch = make_batch("on_policy", tiny_model())
    found = _policy(micro_batch_tokens=50).accumulate(batch, step_of("on_policy"))["rollout/logp_gap_max"]
    largest = float((batch.logp_old_BT - batch.logp_behavior_BT)[batch.response_mask_BT].abs().nan_to_num().max())
    assert largest <= found <= 1.1 * largest


def test_a_loss_that_is_not_finite_stops_the_run_before_the_weights_change() -> None:
    batch, policy = make_batch("luffy", tiny_model()), _policy()
    batch.advantage_BT[batch.response_mask_BT] = float("inf")
    with pytest.raises(NumericalError, match="lower the learning rate"):
        policy.update(batch, step_of("luffy"), 1e-2)
    assert torch.equal(policy.causal_lm.lm_head.weight, tiny_model().lm_head.weight)


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(DataError, match="65 tokens but the model has 64 positions"):
        check_fits(tiny_model(), 65, "the longest example")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_generation_between_updates_sees_the_updated_weights(zero_stage: int, dtype: DType) -> None:
    model = tiny_model().to(getattr(torch, dtype))
    batch = make_batch("luffy", tiny_model())
    policy = Policy(model, OptimizerConfig(lr=0.05), execution(zero_stage=zero_stage), dtype)
    request = RolloutRequest((1, 2, 3), seed=0)
    drawn = []
    for _ in range(2):
        with policy.inference_model() as whole:
            (completion,) = TransformersEngine(whole, 1).generate([request], SamplingParams(1.0, 4, ()))
        drawn.append(completion.logprobs)
        policy.update(batch, step_of("luffy"), 0.05)
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("zero_stage", [1, 2])  # stage 3 sums the norm in float64, where this one is finite
def test_a_gradient_that_is_not_finite_stops_the_run_under_zero(zero_stage: int) -> None:
    batch = make_batch("luffy", tiny_model())
    batch.advantage_BT[batch.response_mask_BT] = 1e38
    with pytest.raises(NumericalError):
        _policy(zero_stage=zero_stage).update(batch, step_of("luffy"), 1e-2)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_gradient_above_the_skip_bound_leaves_weights_and_moments_alone(zero_stage: int) -> None:
    batch = make_batch("luffy", tiny_model())
    loud = dataclasses.replace(batch, advantage_BT=batch.advantage_BT * 1e4)
    bounded = OptimizerConfig(lr=1e-2, max_grad_norm=10.0, skip_grad_norm=20.0)
    unbounded = bounded.model_copy(update={"skip_grad_norm": None})
    skipping, plain = (_policy(optimizer, zero_stage=zero_stage) for optimizer in (bounded, unbounded))
    skipped = skipping.update(loud, step_of("luffy"), 1e-2)
    assert skipped["actor/skipped_update"] == 1.0 and skipped["actor/grad_norm"] > 20.0
    start = tiny_model().state_dict()
    assert all(torch.equal(weight, start[name]) for name, weight in skipping.weights())
    assert skipping.update(batch, step_of("luffy"), 1e-2)["actor/skipped_update"] == 0.0
    plain.update(batch, step_of("luffy"), 1e-2)
    # AdamW's first step: had the skipped one counted, or moved the moments, it would differ.
    expected = dict(plain.weights())
    assert all(torch.equal(weight, expected[name]) for name, weight in skipping.weights())


def test_bfloat16_gradients_hardly_depend_on_the_split() -> None:
    """Summed in bfloat16, a hundred micro-batches would lose more than a percent."""
    batch = make_batch("luffy", tiny_model())
    norms = []
    for tokens in (10_000, 1):
        model = tiny_model().to(torch.bfloat16)
        policy = Policy(model, OptimizerConfig(lr=1e-3), execution(zero_stage=2, micro_batch_tokens=tokens), "bfloat16")
        norms.append(policy.update(batch, step_of("luffy"), 1e-3)["actor/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=5e-3)


class MetaEngine:
    """The part of a DeepSpeed engine that `Policy.accumulate` uses, for a model without values."""

    world_size = 1

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module.to("meta")
        self.num_forward = 0

    def __call__(self, *inputs: object) -> tuple[Tensor, ...]:
        self.num_forward += 1
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()


@pytest.mark.parametrize(("case", "packing"), [*((case, True) for case in CASES), ("luffy", False), ("gspo", False)])
def test_no_micro_batch_waits_for_the_device(case: str, packing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on `meta` have no values, so whatever would read one back to count or compare raises."""
    batch = make_batch(case, tiny_model())
    policy = _policy(packing=packing, micro_batch_tokens=100)
    for module in (ranks, update_metrics, policy_model):
        monkeypatch.setattr(module, "device", lambda: torch.device("meta"))
    monkeypatch.setattr(update_metrics.UpdateMetrics, "summary", lambda *_: {"actor/loss": 0.0})
    monkeypatch.setattr(policy, "engine", MetaEngine(policy.engine.module))
    policy.accumulate(batch, step_of(case))
    num_forward = policy.engine.num_forward
    assert num_forward > 1
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # at the end, all scores at once
        policy.logprobs(batch)
    assert policy.engine.num_forward == 2 * num_forward


class Copies(TorchDispatchMode):
    """Collects the shapes of float32 copies of bfloat16 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._to_copy and (args[0].dtype, result.dtype) == (
            torch.bfloat16,
            torch.float32,
        ):
            self.shapes.append(result.shape)
        return result


def test_no_gradient_is_copied_in_float32_under_zero_1() -> None:
    """The sum takes it as it is; a copy of that of the output embeddings would be the largest tensor of the pass."""
    model = tiny_model().to(torch.bfloat16)
    policy = Policy(model, OPTIMIZER, execution(zero_stage=1, micro_batch_tokens=200), "bfloat16")
    batch = make_batch("luffy", tiny_model())
    with Copies() as copies:
        policy.accumulate(batch, step_of("luffy"))
    assert copies.shapes and not {weight.shape for weight in model.parameters()} & set(copies.shapes)


def test_an_architecture_that_caps_its_logits_is_refused() -> None:
    config = Gemma2Config(
        vocab_size=23, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, initializer_range=0.5,
    )  # fmt: skip
    with pytest.raises(DataError, match="Gemma2ForCausalLM scales or caps its logits"):
        Policy(Gemma2ForCausalLM(config), OPTIMIZER, execution(), "float32")


def test_tied_embeddings_cannot_generate_under_zero_3() -> None:
    policy = Policy(tiny_model(tie=True), OPTIMIZER, execution(zero_stage=3), "float32")
    with pytest.raises(ConfigError, match="use 1 or 2"), policy.inference_model():
        pass

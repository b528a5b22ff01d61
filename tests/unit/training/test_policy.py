"""The policy's own numbers: scores at each token however a batch is cut, by all that score; clips and generation."""

import copy
import dataclasses
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from reference.gradient_case import CASES, OPTIMIZER, execution, make_batch, step_of, tiny_model, trajectories
from reference.rows import evaluate
from reference.value_case import batch
from support.refusals import refused
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from luffy.config.model import DType
from luffy.config.training import OptimizerConfig, SFTConfig
from luffy.errors import ConfigError, DataError, NumericalError
from luffy.objectives.schedules import objective_at
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training import policy_model, ranks, update_metrics
from luffy.training.batching import collate, take_rows
from luffy.training.learner import TrainerRank
from luffy.training.policy import FrozenPolicy, Policy, check_fits
from luffy.training.teachers import DistillationTeacher, ServedScores
from luffy.types import Source, TrainBatch


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


@pytest.mark.parametrize(
    ("zero_stage", "advantage"),
    [(0, math.inf), (1, 1e38), (2, 1e38)],  # stage 3 sums the norm in float64, where this one is finite
)
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(zero_stage, advantage) -> None:
    batch, policy = make_batch("luffy", tiny_model()), _policy(zero_stage=zero_stage)
    batch.advantage_BT[batch.response_mask_BT] = advantage
    with pytest.raises(NumericalError, match="lower the learning rate" if zero_stage == 0 else None):
        policy.update(batch, step_of("luffy"), 1e-2)
    assert torch.equal(policy.causal_lm.lm_head.weight, tiny_model().lm_head.weight)


def test_what_the_model_cannot_do_is_refused() -> None:
    with refused("the longest example", "65 tokens", "64 positions", error=DataError):
        check_fits(tiny_model(), 65, "the longest example")
    tied = Policy(tiny_model(tie=True), OPTIMIZER, execution(zero_stage=3), "float32")
    with refused("use 1 or 2", error=ConfigError), tied.inference_model():
        pass


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


ON_THE_DEVICE = ("luffy", "gspo", "srft", "rl_plus", "hpt", "ppo", "dapo", "opd_topk", "opsd_jsd", "aipo")
"""One case for each kind of term, weight, gate and normaliser; all others are in the second tier."""


@pytest.mark.parametrize(
    ("case", "packing"),
    [
        *((case, False) for case in ON_THE_DEVICE[:2]),
        *(pytest.param(case, True, marks=[pytest.mark.slow] * (case not in ON_THE_DEVICE)) for case in CASES),
    ],
)
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


SPLITS = (
    {"micro_batch_tokens": 10_000},
    {"micro_batch_tokens": 1},
    {"micro_batch_tokens": 25},
    {"micro_batch_tokens": 25, "packing": True},
)
TEMPERATURE = 0.7


def _ids(micro: TrainBatch) -> torch.Tensor:
    return micro.input_ids_BT.double()


def test_a_rank_with_fewer_micro_batches_runs_as_many_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_model, "max_over_ranks", lambda value: value + 2)
    rows, seen = batch(), []

    def forward(micro: TrainBatch) -> torch.Tensor:
        is_dummy = not micro.response_mask_BT.any()
        seen.append(is_dummy)
        return torch.full_like(_ids(micro), torch.nan) if is_dummy else _ids(micro)

    score_BT = policy_model.score(torch.nn.Identity(), forward, rows, execution(micro_batch_tokens=10_000))
    assert seen == [False, True, True]
    assert torch.equal(score_BT, torch.where(rows.response_mask_BT, rows.input_ids_BT, 0).float())


@pytest.mark.parametrize("settings", SPLITS, ids=str)
def test_a_rank_without_rows_runs_as_many_micro_batches_as_the_others(settings, monkeypatch):
    monkeypatch.setattr(policy_model, "max_over_ranks", lambda value: value + 2)
    rows, calls = take_rows(batch(), []), []
    policy = Policy(tiny_model(), OPTIMIZER, execution(**settings), "float32")
    policy.engine.register_forward_hook(lambda *_: calls.append(1))
    terms = SFTConfig(epochs=1, batch_size=1, optimizer=OPTIMIZER).objective.terms
    metrics = policy.accumulate(rows, objective_at(terms, 1, 1, 1))
    assert len(calls) == 2 and metrics["actor/loss"] == 0.0
    gradients = [safe_get_full_grad(parameter) for parameter in policy.causal_lm.parameters()]
    assert not any(gradient.any() for gradient in gradients)
    assert policy.logprobs(rows).numel() == 0 and len(calls) == 4


@pytest.mark.parametrize("settings", SPLITS, ids=str)
def test_log_probabilities_and_entropies_are_those_of_the_whole_model(settings: dict[str, object]) -> None:
    model, rows = tiny_model(), batch()
    with torch.no_grad():
        logits_BTV = model(rows.input_ids_BT, attention_mask=rows.attention_mask_BT).logits[:, :-1] / TEMPERATURE
    every_BTV = torch.distributions.Categorical(logits=logits_BTV)
    mask_BT = rows.response_mask_BT[:, 1:]
    policy = Policy(copy.deepcopy(model), OPTIMIZER, execution(**settings), "float32", TEMPERATURE)
    frozen = FrozenPolicy(copy.deepcopy(model), execution(**settings), TEMPERATURE)
    expected_BT = torch.where(mask_BT, every_BTV.log_prob(rows.input_ids_BT[:, 1:]), 0.0)
    assert torch.allclose(policy.logprobs(rows)[:, 1:], expected_BT, atol=1e-5)
    assert torch.allclose(frozen.logprobs(rows)[:, 1:], expected_BT, atol=1e-5)
    assert torch.allclose(policy.entropies(rows)[:, 1:], torch.where(mask_BT, every_BTV.entropy(), 0.0), atol=1e-5)


@pytest.mark.parametrize("settings", SPLITS, ids=str)
def test_the_mean_probability_of_a_row_is_its_own_whatever_is_scored_beside_it(settings: dict[str, object]) -> None:
    """Against float64, one row at a time: what decides among traces. Every third row has tokens that do not count."""
    rows, policy = trajectories("luffy")[0], Policy(tiny_model(), OPTIMIZER, execution(**settings), "float32")
    rank, model = SimpleNamespace(policy=policy, _spec=SimpleNamespace(pad_id=0)), tiny_model().double()
    with torch.no_grad():
        expected = [float(evaluate(model, row)[0].exp().mean()) for row in rows]
    assert TrainerRank.mean_probabilities(rank, rows) == pytest.approx(expected, rel=1e-5)
    alone = [TrainerRank.mean_probabilities(rank, [row])[0] for row in rows[:6]]
    assert alone == pytest.approx(expected[:6], rel=1e-5)
    assert sorted(range(6), key=alone.__getitem__) == sorted(range(6), key=expected.__getitem__)


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("packing", [False, True])
def test_rows_are_scored_in_the_prompts_that_the_teacher_is_shown(micro_batch_tokens: int, packing: bool) -> None:
    """Every second row has a longer prompt there; what an environment wrote is context and not scored."""
    rows, _ = trajectories("opsd", num_groups=2)
    rows = [replace(row, teacher_prompt_ids=(3, 1, *row.prompt_ids, 5)) if i % 2 else row for i, row in enumerate(rows)]
    where = execution(micro_batch_tokens=micro_batch_tokens, packing=packing)
    teacher = DistillationTeacher(FrozenPolicy(tiny_model(), where, 1.0), flops=None, pad_id=0)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    found_BT = teacher.teach(batch, rows).logp_teacher_BT
    shown = [replace(row, prompt_ids=row.teacher_prompt_ids or row.prompt_ids) for row in rows]
    expected_N = torch.cat([evaluate(tiny_model().double(), row)[0] for row in shown])
    torch.testing.assert_close(found_BT[batch.response_mask_BT].double(), expected_N, rtol=0, atol=1e-5)
    assert not found_BT[~batch.response_mask_BT].any()


def test_scores_from_servers_lie_where_those_of_a_model_on_the_rank_do() -> None:
    rows, _ = trajectories("opd", num_groups=2)
    assert any(Source.ENVIRONMENT in row.source for row in rows)
    teacher = DistillationTeacher(FrozenPolicy(tiny_model(), execution(), 1.0), flops=None, pad_id=0)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    expected_BT = teacher.teach(batch, rows).logp_teacher_BT
    carried = [
        replace(row, teacher_logprobs=tuple(logp_T[mask_T].tolist()))
        for row, logp_T, mask_T in zip(rows, expected_BT, batch.response_mask_BT, strict=True)
    ]
    assert torch.equal(ServedScores().teach(batch, carried).logp_teacher_BT, expected_BT)

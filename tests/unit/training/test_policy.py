"""The policy's own numbers and its teachers': scores at each token however a batch is cut, by all that score."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from reference.gradient_case import (
    CASES,
    OPTIMIZER,
    execution,
    make_batch,
    objective_of,
    step_of,
    tiny_model,
    trajectories,
)
from reference.rows import evaluate, evaluate_all
from reference.value_case import batch
from support.refusals import refused
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from luffy.config.model import DType
from luffy.config.terms import DivergenceLoss
from luffy.config.training import OptimizerConfig, SFTConfig
from luffy.errors import ConfigError, DataError, NumericalError
from luffy.objectives.schedules import objective_at
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training import policy_model, ranks, update_metrics
from luffy.training.batching import collate, take_rows
from luffy.training.learner import TrainerRank
from luffy.training.policy import FrozenPolicy, Policy, check_fits
from luffy.training.teachers import DistillationTeacher, ServedScores, Teachers
from luffy.types import Source, TrainBatch, Trajectory


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
    [(0, math.inf), (1, 1e38), (2, 1e38)],  # stage 3 sums the norm in float64, where it is finite
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
    loud = replace(batch, advantage_BT=batch.advantage_BT * 1e4)
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
        is_copy = func.overloadpacket is torch.ops.aten._to_copy
        if is_copy and (args[0].dtype, result.dtype) == (torch.bfloat16, torch.float32):
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


def test_a_rank_with_fewer_micro_batches_runs_as_many_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_model, "max_over_ranks", lambda value: value + 2)
    rows, seen = batch(), []

    def forward(micro: TrainBatch) -> torch.Tensor:
        seen.append(not micro.response_mask_BT.any())
        return micro.input_ids_BT.double() * (torch.nan if seen[-1] else 1.0)

    score_BT = policy_model.score(torch.nn.Identity(), forward, rows, execution(micro_batch_tokens=10_000))
    assert seen == [False, True, True]
    assert torch.equal(score_BT, torch.where(rows.response_mask_BT, rows.input_ids_BT, 0).float())


@pytest.mark.parametrize("settings", SPLITS, ids=str)
def test_a_rank_without_rows_runs_as_many_micro_batches_as_the_others(settings, monkeypatch):
    monkeypatch.setattr(policy_model, "max_over_ranks", lambda value: value + 2)
    rows, calls = take_rows(batch(), []), []
    policy = _policy(**settings)
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
def test_the_mean_probability_and_entropy_of_a_row_are_its_own_whatever_is_scored_beside_it(
    settings: dict[str, object],
) -> None:
    """Against float64, one row at a time: what decides among traces, and among successes to replay. Every third row has
    tokens that do not count."""
    rows, policy = trajectories("luffy")[0], _policy(**settings)
    rank, model = SimpleNamespace(policy=policy, _spec=SimpleNamespace(pad_id=0)), tiny_model().double()
    with torch.no_grad():
        scored = [evaluate(model, row) for row in rows]
    expected = [float(logp.exp().mean()) for logp, _ in scored]
    entropies = [float(entropy.mean()) for _, entropy in scored]
    assert TrainerRank.entropies(rank, rows) == pytest.approx(entropies, rel=1e-5)
    assert TrainerRank.mean_probabilities(rank, rows) == pytest.approx(expected, rel=1e-5)
    alone = [TrainerRank.mean_probabilities(rank, [row])[0] for row in rows[:6]]
    assert alone == pytest.approx(expected[:6], rel=1e-5)
    assert sorted(range(6), key=alone.__getitem__) == sorted(range(6), key=expected.__getitem__)


# ---- teachers: whose tokens are compared, entropies, several models ----

TOP_K = 4
TWO_SPLITS = ({"micro_batch_tokens": 10_000}, {"micro_batch_tokens": 40, "packing": True})


def _taught_rows() -> list[Trajectory]:
    """Every second row has a longer prompt for its teacher; the groups have teacher 0, teacher 1 and none."""
    rows, groups = trajectories("opsd", num_groups=3)
    longer = [(3, 1, *row.prompt_ids, 5) if i % 2 else () for i, row in enumerate(rows)]
    return [
        replace(row, teacher_prompt_ids=ids, taught_by=(0, 1, -1)[group])
        for row, ids, group in zip(rows, longer, groups, strict=True)
    ]


def _collated(rows: Sequence[Trajectory]) -> TrainBatch:
    return collate(rows, torch.zeros(len(rows)), pad_id=0)


def _everything(seed: int, rows: Sequence[Trajectory], shown: bool = True) -> Tensor:
    """`(N, V)` log-probabilities at the learnable tokens, under the prompts that the teacher is shown."""
    model, texts = tiny_model(seed).double(), rows
    if shown:
        texts = [replace(row, prompt_ids=row.teacher_prompt_ids or row.prompt_ids) for row in rows]
    with torch.no_grad():
        return torch.cat([evaluate_all(model, row) for row in texts])


def _divergence(over: str, top_k: int = TOP_K) -> DivergenceLoss:
    return DivergenceLoss(kind="divergence", measure="jsd", top_k=top_k, over=over)


def _teacher(
    seed: int, over: str | None, entropy: bool = False, top_k: int = TOP_K, **settings: object
) -> DistillationTeacher:
    where = execution(**settings)
    own = None if over is None else 0 if over == "policy" else top_k
    return DistillationTeacher(FrozenPolicy(tiny_model(seed), where, 1.0), None, 0, own, entropy)


def _taught(over: str, top_k: int, rows: Sequence[Trajectory], **settings: object) -> TrainBatch:
    student = _policy(**settings)
    teacher = _teacher(1, over, entropy=True, top_k=top_k, **settings)
    return Teachers([teacher], student, _divergence(over, top_k)).teach(_collated(rows), rows)


@pytest.mark.parametrize("settings", TWO_SPLITS, ids=str)
@pytest.mark.parametrize("top_k", [TOP_K, 15, 64])
@pytest.mark.parametrize("over", ["teacher", "policy", "both"])
def test_the_tokens_that_are_compared_and_the_entropy_equal_float64(over: str, top_k: int, settings: dict) -> None:
    """Of 23 tokens, more than both name together, fewer than that, and fewer than one of them asks for."""
    rows = _taught_rows()
    batch = _taught(over, top_k, rows, **settings)
    mask_BT = batch.response_mask_BT
    logq_NV, logp_NV = _everything(1, rows), _everything(0, rows, shown=False)
    ranked = [logits_NV.argsort(dim=-1, descending=True).tolist() for logits_NV in (logq_NV, logp_NV)]
    for choice_C, logq_C, logq_V, of_teacher, of_policy in zip(
        batch.choice_BTC[mask_BT].tolist(), batch.logq_BTC[mask_BT].double(), logq_NV, *ranked, strict=True
    ):
        first = of_teacher[:top_k] if over != "policy" else []
        more = [token for token in of_policy[: 2 * top_k] if token not in first][:top_k] if over != "teacher" else []
        assert sorted(choice_C) == sorted([*first, *more]) and len({*choice_C}) == len(choice_C)
        torch.testing.assert_close(logq_C[:-1], logq_V[choice_C], rtol=0, atol=1e-5)
        others_V = logq_V.index_fill(0, torch.tensor(choice_C), -torch.inf)
        torch.testing.assert_close(logq_C[-1].exp(), others_V.exp().sum(), rtol=0, atol=1e-5)
    entropy_N = -(logq_NV.exp() * logq_NV).sum(-1)
    torch.testing.assert_close(batch.entropy_teacher_BT[mask_BT].double(), entropy_N, rtol=0, atol=1e-5)
    assert not batch.entropy_teacher_BT[~mask_BT].any()


@pytest.mark.parametrize("settings", TWO_SPLITS, ids=str)
@pytest.mark.parametrize("over", ["teacher", "policy", "both", None])
def test_each_row_has_the_scores_of_its_own_teacher(over: str | None, settings: dict) -> None:
    rows, student = _taught_rows(), _policy(**settings)
    batch = _collated(rows)
    scorers = [_teacher(seed, over, **settings) for seed in (1, 2)]
    divergence = None if over is None else _divergence(over)
    found = Teachers(scorers, student, divergence).teach(batch, rows)
    for index, seed in enumerate((1, 2)):
        own = [row.taught_by == index for row in rows]
        mask_BT = batch.response_mask_BT & torch.tensor(own).unsqueeze(-1)
        logq_NV = _everything(seed, [row for row, is_own in zip(rows, own, strict=True) if is_own])
        expected_N = logq_NV.gather(-1, batch.input_ids_BT[mask_BT].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(found.logp_teacher_BT[mask_BT].double(), expected_N, rtol=0, atol=1e-5)
        if over is not None:
            chosen_NC = found.choice_BTC[mask_BT].long()
            logq_NC = found.logq_BTC[mask_BT][:, :-1].double()
            torch.testing.assert_close(logq_NC, logq_NV.gather(-1, chosen_NC), rtol=0, atol=1e-5)
    untaught_BT = torch.tensor([row.taught_by < 0 for row in rows]).unsqueeze(-1).expand_as(batch.response_mask_BT)
    assert not found.logp_teacher_BT[untaught_BT].any()
    alone = Teachers(scorers, student, divergence).teach(_collated(rows[:2]), rows[:2])
    torch.testing.assert_close(alone.logp_teacher_BT, found.logp_teacher_BT[:2, : alone.logp_teacher_BT.shape[1]])


def test_scores_from_servers_lie_where_those_of_a_model_on_the_rank_do() -> None:
    """Beside a model, in rows between whose tokens an environment has written."""
    rows, student, models = _taught_rows(), _policy(), [_teacher(seed, None) for seed in (1, 2)]
    assert any(Source.ENVIRONMENT in row.source for row in rows)
    batch = _collated(rows)
    expected_BT = Teachers(models, student).teach(batch, rows).logp_teacher_BT
    scored = zip(rows, expected_BT, batch.response_mask_BT, strict=True)
    carried = [replace(row, teacher_logprobs=tuple(of_T[own_T].tolist())) for row, of_T, own_T in scored]
    carried = [row if row.taught_by == 0 else replace(row, teacher_logprobs=()) for row in carried]
    beside_BT = Teachers([ServedScores(), models[1]], student).teach(batch, carried).logp_teacher_BT
    assert torch.equal(beside_BT, expected_BT)
    own_BT = torch.where(torch.tensor([[row.taught_by == 0] for row in rows]), expected_BT, 0.0)
    assert own_BT.any() and torch.equal(ServedScores().teach(batch, carried).logp_teacher_BT, own_BT)


def test_a_model_that_takes_turns_scores_as_one_that_stays() -> None:
    """Here both have the same memory: what moves weights to a GPU and back leaves them as they are."""
    batch, plain = _collated(_taught_rows()), FrozenPolicy(tiny_model(1), execution(), 1.0)
    frozen = FrozenPolicy(tiny_model(1), execution(), 1.0, takes_turns=True)
    weights = {name: weight.data_ptr() for name, weight in frozen.causal_lm.named_parameters()}
    for _ in range(2):
        with frozen.on_device():
            assert torch.equal(frozen.logprobs(batch), plain.logprobs(batch))
    assert {name: weight.data_ptr() for name, weight in frozen.causal_lm.named_parameters()} == weights


@pytest.mark.parametrize("over", ["policy", "both"])
def test_a_policy_learns_over_its_own_tokens(over: str) -> None:
    """The loss that is reported is the divergence in float64 over these tokens."""
    rows, loss = _taught_rows(), _divergence(over)
    batch = _taught(over, TOP_K, rows)
    objective = objective_of("gkd")
    assert objective is not None
    terms = tuple(term.model_copy(update={"loss": loss}) for term in objective.terms)
    student = _policy(micro_batch_tokens=40)
    found = student.accumulate(batch, objective_at(terms, 1, 1, 8))["actor/loss"]
    mask_BT = batch.response_mask_BT
    chosen_NC = batch.choice_BTC[mask_BT].long()

    def coarse(logp_NV: Tensor) -> Tensor:
        rest_N1 = logp_NV.scatter(-1, chosen_NC, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([logp_NV.gather(-1, chosen_NC), rest_N1], dim=-1)

    q, p = coarse(_everything(1, rows)), coarse(_everything(0, rows, shown=False))
    m = torch.log(0.5 * q.exp() + 0.5 * p.exp())
    expected = 0.5 * (q.exp() * (q - m)).sum(-1) + 0.5 * (p.exp() * (p - m)).sum(-1)
    assert found == pytest.approx(float(expected.mean()), rel=1e-5)

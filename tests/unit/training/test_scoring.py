"""Scores of a batch: each at its own token however the batch is cut, by the models that score and by a teacher."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from reference.gradient_case import OPTIMIZER, execution, tiny_model, trajectories
from reference.rows import evaluate
from reference.value_case import batch

from luffy.config.training import SFTConfig
from luffy.objectives.schedules import objective_at
from luffy.training import policy_model
from luffy.training.batching import collate, take_rows
from luffy.training.learner import TrainerRank
from luffy.training.policy import DistillationTeacher, FrozenPolicy, Policy, ServedScores
from luffy.types import Source, TrainBatch

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

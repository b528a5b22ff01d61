"""Teachers on a rank against float64, one row at a time: whose tokens are compared, entropies, several models."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from reference.gradient_case import OPTIMIZER, execution, objective_of, tiny_model, trajectories
from reference.rows import evaluate_all
from torch import Tensor

from luffy.config.terms import DivergenceLoss
from luffy.objectives.schedules import objective_at
from luffy.training.batching import collate
from luffy.training.policy import FrozenPolicy, Policy
from luffy.training.teachers import DistillationTeacher, ServedScores, Teachers
from luffy.types import TrainBatch, Trajectory

TOP_K = 4
SPLITS = ({"micro_batch_tokens": 10_000}, {"micro_batch_tokens": 40, "packing": True})


def _rows(num_groups: int = 3) -> list[Trajectory]:
    """Every second row has a longer prompt for its teacher; the groups have teacher 0, teacher 1 and none."""
    rows, groups = trajectories("opsd", num_groups)
    shown = [
        replace(row, teacher_prompt_ids=(3, 1, *row.prompt_ids, 5)) if i % 2 else row for i, row in enumerate(rows)
    ]
    return [replace(row, taught_by=(0, 1, -1)[group % 3]) for row, group in zip(shown, groups, strict=True)]


def _everything(seed: int, rows: Sequence[Trajectory]) -> Tensor:
    """`(N, V)` log-probabilities at the learnable tokens, under the prompts that the teacher is shown."""
    model = tiny_model(seed).double()
    with torch.no_grad():
        return torch.cat(
            [evaluate_all(model, replace(r, prompt_ids=r.teacher_prompt_ids or r.prompt_ids)) for r in rows]
        )


def _divergence(over: str, top_k: int = TOP_K) -> DivergenceLoss:
    return DivergenceLoss(kind="divergence", measure="jsd", top_k=top_k, over=over)


def _teacher(
    seed: int, over: str | None, entropy: bool = False, top_k: int = TOP_K, **settings: object
) -> DistillationTeacher:
    where = execution(**settings)
    own = None if over is None else 0 if over == "policy" else top_k
    return DistillationTeacher(FrozenPolicy(tiny_model(seed), where, 1.0), None, 0, own, entropy)


def _taught(over: str, top_k: int, rows: Sequence[Trajectory], **settings: object) -> TrainBatch:
    student = Policy(tiny_model(), OPTIMIZER, execution(**settings), "float32")
    teacher = _teacher(1, over, entropy=True, top_k=top_k, **settings)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    return Teachers([teacher], student, _divergence(over, top_k)).teach(batch, rows)


@pytest.mark.parametrize("settings", SPLITS, ids=str)
@pytest.mark.parametrize("top_k", [TOP_K, 15, 64])
@pytest.mark.parametrize("over", ["teacher", "policy", "both"])
def test_the_tokens_that_are_compared_and_the_entropy_equal_float64(over: str, top_k: int, settings: dict) -> None:
    """Of 23 tokens, more than both name together, fewer than that, and fewer than one of them asks for."""
    rows = _rows()
    batch = _taught(over, top_k, rows, **settings)
    mask_BT = batch.response_mask_BT
    logq_NV, logp_NV = _everything(1, rows), _everything(0, [replace(row, teacher_prompt_ids=()) for row in rows])
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


@pytest.mark.parametrize("settings", SPLITS, ids=str)
@pytest.mark.parametrize("over", ["teacher", "policy", "both", None])
def test_each_row_has_the_scores_of_its_own_teacher(over: str | None, settings: dict) -> None:
    rows, student = _rows(), Policy(tiny_model(), OPTIMIZER, execution(**settings), "float32")
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
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
    alone = Teachers(scorers, student, divergence).teach(collate(rows[:2], torch.zeros(2), pad_id=0), rows[:2])
    torch.testing.assert_close(alone.logp_teacher_BT, found.logp_teacher_BT[:2, : alone.logp_teacher_BT.shape[1]])


def test_a_served_teacher_beside_a_model() -> None:
    rows, student = _rows(), Policy(tiny_model(), OPTIMIZER, execution(), "float32")
    scored = [replace(row, teacher_logprobs=(-0.5,) * row.num_learnable) if row.taught_by == 0 else row for row in rows]
    batch = collate(scored, torch.zeros(len(rows)), pad_id=0)
    found = Teachers([ServedScores(), _teacher(2, None)], student).teach(batch, scored)
    mask_BT = batch.response_mask_BT & torch.tensor([row.taught_by == 0 for row in rows]).unsqueeze(-1)
    assert (found.logp_teacher_BT[mask_BT] == -0.5).all()


def test_a_model_that_takes_turns_scores_as_one_that_stays() -> None:
    """Here both have the same memory: what moves weights to a GPU and back leaves them as they are."""
    rows = _rows()
    batch, plain = collate(rows, torch.zeros(len(rows)), pad_id=0), FrozenPolicy(tiny_model(1), execution(), 1.0)
    frozen = FrozenPolicy(tiny_model(1), execution(), 1.0, takes_turns=True)
    weights = {name: weight.data_ptr() for name, weight in frozen.causal_lm.named_parameters()}
    for _ in range(2):
        with frozen.on_device():
            assert torch.equal(frozen.logprobs(batch), plain.logprobs(batch))
    assert {name: weight.data_ptr() for name, weight in frozen.causal_lm.named_parameters()} == weights


@pytest.mark.parametrize("over", ["policy", "both"])
def test_a_policy_learns_over_its_own_tokens(over: str) -> None:
    """The loss that is reported is the divergence in float64 over these tokens."""
    rows, loss = _rows(), _divergence(over)
    batch = _taught(over, TOP_K, rows)
    objective = objective_of("gkd")
    assert objective is not None
    terms = tuple(term.model_copy(update={"loss": loss}) for term in objective.terms)
    student = Policy(tiny_model(), OPTIMIZER, execution(micro_batch_tokens=40), "float32")
    found = student.accumulate(batch, objective_at(terms, 1, 1, 8))["actor/loss"]
    mask_BT = batch.response_mask_BT
    chosen_NC = batch.choice_BTC[mask_BT].long()

    def coarse(logp_NV: Tensor) -> Tensor:
        rest_N1 = logp_NV.scatter(-1, chosen_NC, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([logp_NV.gather(-1, chosen_NC), rest_N1], dim=-1)

    q, p = coarse(_everything(1, rows)), coarse(_everything(0, [replace(row, teacher_prompt_ids=()) for row in rows]))
    m = torch.log(0.5 * q.exp() + 0.5 * p.exp())
    expected = 0.5 * (q.exp() * (q - m)).sum(-1) + 0.5 * (p.exp() * (p - m)).sum(-1)
    assert found == pytest.approx(float(expected.mean()), rel=1e-5)

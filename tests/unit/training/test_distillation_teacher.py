"""The teacher's scores of the policy's tokens, in its own prompts and by any split into micro-batches."""

from dataclasses import replace

import pytest
import torch
from reference.gradient_case import execution, tiny_model, trajectories
from reference.rows import evaluate

from luffy.training.batching import collate
from luffy.training.policy import DistillationTeacher, FrozenPolicy, ServedScores
from luffy.types import Source


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("packing", [False, True])
def test_rows_are_scored_in_the_prompts_that_the_teacher_is_shown(micro_batch_tokens: int, packing: bool) -> None:
    """Every second row has a longer prompt there; what an environment wrote is context and not scored."""
    rows, _ = trajectories("opsd", num_groups=2)
    rows = [replace(row, teacher_prompt_ids=(3, 1, *row.prompt_ids, 5)) if i % 2 else row for i, row in enumerate(rows)]
    where = execution(micro_batch_tokens=micro_batch_tokens, packing=packing)
    teacher = DistillationTeacher(FrozenPolicy(tiny_model(), where, 1.0), flops=None, pad_id=0)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    found_BT = teacher.logprobs(batch, rows)
    shown = [replace(row, prompt_ids=row.teacher_prompt_ids or row.prompt_ids) for row in rows]
    expected_N = torch.cat([evaluate(tiny_model().double(), row)[0] for row in shown])
    torch.testing.assert_close(found_BT[batch.response_mask_BT].double(), expected_N, rtol=0, atol=1e-5)
    assert not found_BT[~batch.response_mask_BT].any()


def test_scores_from_servers_lie_where_those_of_a_model_on_the_rank_do() -> None:
    rows, _ = trajectories("opd", num_groups=2)
    assert any(Source.ENVIRONMENT in row.source for row in rows)
    teacher = DistillationTeacher(FrozenPolicy(tiny_model(), execution(), 1.0), flops=None, pad_id=0)
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    expected_BT = teacher.logprobs(batch, rows)
    carried = [
        replace(row, teacher_logprobs=tuple(logp_T[mask_T].tolist()))
        for row, logp_T, mask_T in zip(rows, expected_BT, batch.response_mask_BT, strict=True)
    ]
    assert torch.equal(ServedScores().logprobs(batch, carried), expected_BT)

"""Hybrid rows from the real engine: what is recorded is what a forward pass over the whole row finds."""

import math

import pytest
import torch
from patience import PATIENCE_S
from reference.gradient_case import tiny_model

from luffy.config.objective import GroupConfig
from luffy.grading.pool import GraderPool
from luffy.rl.groups import GroupCollector
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.rollout.engine import SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.types import Group, Source, Trajectory

LIMIT = 16
PREFIX = {"length": {"kind": "uniform", "low": 0.1, "high": 0.9}}


def _groups(batch_size: int) -> list[Group]:
    trace = Demonstration("", tuple(5 + i % 11 for i in range(12)), tuple(-0.01 * i for i in range(12)))
    tasks = [RolloutTask(f"p{i}", tuple(range(1, 3 + i)), "7", (trace,)) for i in range(4)]
    config = GroupConfig.model_validate({"size": 4, "off_policy": 2, "prefix": PREFIX})
    params = SamplingParams(1.0, LIMIT, stop_token_ids=(4,))
    with GraderPool(1, PATIENCE_S) as grader:
        collector = GroupCollector(grader, lambda ids: "", params, config, seed=3, total_steps=10)
        return collector.collect(TransformersEngine(tiny_model().eval(), batch_size, weight_version=5), tasks, step=2)


@torch.no_grad()
def _logp(row: Trajectory) -> torch.Tensor:
    """Of every response token under the model, by one forward pass over prompt and response."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    logp_TV = tiny_model().eval()(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
    start = len(row.prompt_ids)
    return logp_TV[start - 1 : -1].gather(-1, ids[0, start:, None]).squeeze(-1)


def test_the_continuation_has_the_policy_s_log_probabilities_and_the_prefix_its_author_s() -> None:
    hybrid = [row for group in _groups(64) for row in group.trajectories if row.is_off_policy]
    assert len(hybrid) == 8
    for row in hybrid:
        given = row.source.count(Source.OFF_POLICY)
        assert row.source == (Source.OFF_POLICY,) * given + (Source.ON_POLICY,) * (len(row.response_ids) - given)
        assert row.logp_behavior[:given] == tuple(-0.01 * i for i in range(given))
        assert row.logp_behavior[given:] == pytest.approx(_logp(row)[given:].tolist(), abs=1e-5)
        assert row.weight_version == (-1,) * given + (5,) * (len(row.response_ids) - given)
        assert given < len(row.response_ids) <= LIMIT


def test_hybrid_rows_do_not_depend_on_the_batch_they_are_made_in() -> None:
    together, alone = _groups(64), _groups(1)
    for left, right in zip(together, alone, strict=True):
        assert [row.response_ids for row in left.trajectories] == [row.response_ids for row in right.trajectories]
        assert all(not math.isnan(logp) for row in left.trajectories for logp in row.logp_behavior)

"""Tokens that a stage has spent: counted from its metrics, so that a resumed stage ends at the same step."""

import pytest

from luffy.tracking.metrics import TokenBudget, tokens_spent

ROWS = [{"step": 1.0, "rollout/tokens_drawn": 30.0, "batch/response_tokens": 20.0}] * 4


def last_step(limit, resumed_from=0):
    budget = TokenBudget(limit, ROWS[:resumed_from])
    step = resumed_from
    while not budget.is_over and step < len(ROWS):
        budget.count(ROWS[step])
        step += 1
    return step


@pytest.mark.parametrize(("limit", "step"), [(1, 1), (50, 1), (51, 2), (100, 2), (10_000, 4), (None, 4)])
def test_a_stage_ends_with_the_step_that_reaches_the_limit_wherever_it_was_resumed(limit, step):
    assert [last_step(limit, resumed_from) for resumed_from in range(step + 1)] == [step] * (step + 1)


def test_sft_spends_what_it_learns_from_and_rl_also_what_it_samples():
    assert tokens_spent({"batch/response_tokens": 7.0, "perf/step_s": 3.0}) == 7
    assert tokens_spent(ROWS[0]) == 50

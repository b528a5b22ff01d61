"""Advice comes where most responses have no answer, and names what is likely to be wrong."""

import pytest

from luffy.tracking.advice import advice_on_responses, advice_on_rollouts
from luffy.tracking.rollout_metrics import rollout_metrics
from luffy.types import FinishReason, Group, Outcome, Source, Trajectory


@pytest.mark.parametrize(
    ("unread", "truncated", "asked"),
    [
        (0.5, 1.0, None),
        (0.96, 0.1, "math: 96 % of the responses have no answer that the grader can read; does the prompt ask for the"),
        (0.96, 0.9, "can read, and 90 % were cut off; does the prompt ask for a box? Is the.limit too low?"),
    ],
)
def test_the_line_says_how_many_and_what_to_look_at(unread: float, truncated: float, asked: str | None) -> None:
    said = advice_on_responses("math", unread, truncated, "the.limit")
    assert said is None if asked is None else said is not None and asked in said


def step(*outcomes: Outcome) -> dict[str, float]:
    rows = [
        Trajectory((1,), (2,), (Source.ON_POLICY,), (-1.0,), (0,), float(o is Outcome.CORRECT), o, FinishReason.STOP)
        for o in outcomes
    ]
    return rollout_metrics([Group("a", tuple(rows))])


def test_a_run_whose_rollouts_were_mostly_unreadable_is_advised() -> None:
    silent = step(Outcome.NO_ANSWER, Outcome.UNPARSABLE, Outcome.NO_ANSWER, Outcome.WRONG)
    said = advice_on_rollouts([silent, silent, step(Outcome.NO_ANSWER, Outcome.CORRECT)])
    assert said is not None and said.startswith("rollouts: 67 % of the responses")


def test_a_run_that_answers_is_not_advised() -> None:
    wrong = step(Outcome.WRONG, Outcome.WRONG, Outcome.NO_ANSWER)
    assert advice_on_rollouts([wrong, {"batch/optimizer_steps": 0.0}]) is None
    assert advice_on_rollouts([]) is None

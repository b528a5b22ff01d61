"""What a run is told: most steps taught the policy nothing, or most responses had no answer."""

import pytest
from synthetic.trajectories import row_of

from luffy.config import load_experiment
from luffy.tracking.advice import advice_on_responses, advice_on_rl, advice_on_rollouts, advice_on_signal, had_signal
from luffy.tracking.rollout_metrics import rollout_metrics
from luffy.types import Group, Outcome

ZERO, ENTROPY, UPDATES = "batch/zero_advantage_share", "actor/entropy_on_policy", "batch/optimizer_steps"
SILENT = {ZERO: 1.0, ENTROPY: 2.0, "batch/solve_none": 1.0, "batch/solve_all": 0.0}


@pytest.mark.parametrize(
    ("step", "signal"), [(SILENT, False), ({UPDATES: 0.0}, False), ({ZERO: 0.9, UPDATES: 1.0}, True), ({}, None)]
)
def test_a_step_has_a_signal_where_an_advantage_is_not_0(step: dict[str, float], signal: bool | None) -> None:
    assert had_signal(step) is signal


def test_a_run_that_mostly_had_none_is_told_what_happened_to_its_policy() -> None:
    steps = [SILENT, {ZERO: 0.5, ENTROPY: 3.0}, {}, SILENT | {ENTROPY: 8.79}]
    said = advice_on_signal(steps, has_regularising_terms=True)
    assert said is not None and said.startswith("in 2 of 3 steps every advantage was 0")
    assert "entropy per token went from 2.00 to 8.79 nats" in said and "begin with SFT" in said
    assert "entropy" not in str(advice_on_signal(steps, has_regularising_terms=False))


def test_a_run_that_has_solved_its_prompts_is_told_to_take_harder_ones_and_one_with_a_signal_nothing() -> None:
    solved = SILENT | {"batch/solve_none": 0.0, "batch/solve_all": 1.0}
    said = advice_on_signal([SILENT, solved, solved], has_regularising_terms=False)
    assert said is not None and "take harder ones" in said and "SFT" not in said
    assert advice_on_signal([SILENT, {ZERO: 0.5}], has_regularising_terms=True) is None
    assert advice_on_signal([], has_regularising_terms=True) is None


@pytest.mark.parametrize(
    ("method", "by_advantage", "regularised"),
    [
        ("on_policy", True, True),
        ("dapo", True, False),
        ("luffy", True, True),
        ("relift", False, False),
        ("srft", False, False),
        ("chord", False, False),
    ],
)
def test_a_method_that_also_learns_otherwise_is_left_alone(method: str, by_advantage: bool, regularised: bool) -> None:
    objective = load_experiment("exp_configs/smoke.yaml", ["chain=rl", f"method={method}"]).objective
    assert objective is not None
    assert (objective.learns_by_advantage, objective.has_regularising_terms) == (by_advantage, regularised)
    assert bool(advice_on_rl(objective, [SILENT])) == by_advantage


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
    return rollout_metrics([Group("a", tuple(row_of(o is Outcome.CORRECT, outcome=o) for o in outcomes))])


def test_a_run_whose_rollouts_were_mostly_unreadable_is_advised_and_one_that_answers_is_not() -> None:
    silent = step(Outcome.NO_ANSWER, Outcome.UNPARSABLE, Outcome.NO_ANSWER, Outcome.WRONG)
    said = advice_on_rollouts([silent, silent, step(Outcome.NO_ANSWER, Outcome.CORRECT)])
    assert said is not None and said.startswith("rollouts: 67 % of the responses")
    wrong = step(Outcome.WRONG, Outcome.WRONG, Outcome.NO_ANSWER)
    assert advice_on_rollouts([wrong, {"batch/optimizer_steps": 0.0}]) is None
    assert advice_on_rollouts([]) is None

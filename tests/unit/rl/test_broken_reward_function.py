"""A reward function of the user's that fails gives no reward: 0 would train the policy on the function's faults."""

import pytest
from support.patience import PATIENCE_S
from support.refusals import refused

from luffy.config.grading import (
    AnyGrader,
    BothGrader,
    CustomGrader,
    GradingConfig,
    MathGrader,
    WeightedGrader,
    WeightedPart,
)
from luffy.config.group import GroupConfig
from luffy.errors import ConfigError
from luffy.grading.pool import GraderPool
from luffy.rl.groups import GroupCollector
from luffy.rl.rows import RolloutTask
from luffy.rollout.engine import Completion, SamplingParams
from luffy.types import FinishReason, Outcome

OWN = CustomGrader(function="broken_reward:score", correct_from=0.5)
SCORE = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    if "9" in solution_str:
        {fault}
    return 1.0 if ground_truth in solution_str else 0.25
"""
RIGHT, WRONG, BROKEN = r"\boxed{7}", r"\boxed{8}", r"\boxed{9}"
FAULTS = ("return None", "return float('nan')", "return 'good'", "raise ValueError('no 9 here')")


class Says:
    """An engine that answers with these texts in turn; a token is the place of its text."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def generate(self, requests, params):
        return [
            Completion((place % len(self.texts),), (-1.0,), FinishReason.STOP, (0,)) for place in range(len(requests))
        ]

    def text(self, ids):
        return self.texts[ids[0]]

    def close(self): ...


def collected(kind, *texts):
    engine = Says(*texts)
    with GraderPool(1, PATIENCE_S, GradingConfig(kind=kind)) as grader:
        config = GroupConfig(size=len(texts))
        collector = GroupCollector(grader, engine.text, SamplingParams(1.0, 8, ()), config, seed=0, total_steps=1)
        return collector.collect(engine, [RolloutTask("p", (5, 6), "7", ())], 1)[0]


@pytest.fixture(autouse=True)
def own_function(tmp_path, monkeypatch):
    """Writes the module with one fault, where the workers' Python looks."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def write(fault: str = FAULTS[0]) -> None:
        (tmp_path / "broken_reward.py").write_text(SCORE.format(fault=fault))

    write()
    return write


@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_whose_function_fails_is_in_no_baseline_and_no_update(own_function, fault):
    own_function(fault)
    group = collected(OWN, RIGHT, WRONG, BROKEN)
    assert group.rewards == [1.0, 0.25]
    (failed,) = group.failed
    assert (failed.outcome, failed.finish_reason, failed.reward) == (Outcome.CRASHED, FinishReason.GRADER_ERROR, 0.0)


@pytest.mark.parametrize(
    ("kind", "rewards"),
    [
        (AnyGrader(of=(MathGrader(), OWN)), [1.0, 0.25]),
        (BothGrader(of=(OWN, MathGrader())), [1.0, 0.0]),
        (
            WeightedGrader(parts=(WeightedPart(weight=1, grader=OWN), WeightedPart(weight=2, grader=MathGrader()))),
            [3, 0.25],
        ),
    ],
)
def test_a_combination_that_the_function_could_decide_has_no_reward_either(kind, rewards):
    group = collected(kind, RIGHT, WRONG, BROKEN)
    assert group.rewards == rewards and len(group.failed) == 1


def test_a_function_that_fails_for_most_responses_ends_the_stage_in_one_line(own_function):
    own_function("raise ValueError('no 9 here')")
    with refused("3 of 4", "broken_reward:score raised ValueError: no 9 here", error=ConfigError):
        collected(OWN, BROKEN, WRONG, BROKEN, BROKEN)

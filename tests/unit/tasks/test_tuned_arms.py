"""From what was tried to what runs with the reported seeds."""

import pytest
from synthetic.suite_scores import evaluation

from luffy.config.many_runs.comparison import load_comparison
from luffy.errors import LuffyError
from luffy.evaluation.method_comparison.arms import Costs, FinishedSeed
from luffy.evaluation.method_comparison.tuning import ArmTuning, Tuning, tried
from luffy.tasks.comparison import ReportedRuns, _arm, _chosen, tuned

CELL = ("validation", "greedy")
COSTS = Costs(12.0, 96.0, 1000.0, 1500.0, 61.0, None)


@pytest.fixture(scope="module")
def comparison():
    return load_comparison("compare_tuned", ["seeds=[11, 12]"])


def tuning(comparison, solved):
    """Tries that solve `solved[arm]` problems each; arms without an entry have failed everywhere."""
    return Tuning(
        "validation", "greedy", (100,), False,
        tuple(
            ArmTuning(arm, tuple(
                tried(each.point, [FinishedSeed(100, evaluation(validation=right), COSTS, ())], {}, CELL, 0.95)
                if right is not None else tried(each.point, [], {100: "was ended"}, CELL, 0.95)
                for each, right in zip(comparison.candidates_of(arm), solved.get(arm, (None,) * 3), strict=True)
            ))
            for arm in comparison.config.arms
        ),
    )  # fmt: skip


def test_an_arm_runs_with_the_values_that_its_own_tries_chose(comparison):
    found = tuning(comparison, {"luffy": (10, 30, 20), "sft": (10, 20, 30)})
    assert _chosen(comparison, "luffy", found).config.rl.optimizer.lr == 1e-4
    assert _chosen(comparison, "sft", found).config.sft.optimizer.lr == 8e-4
    runs = comparison.reported_runs({name: _chosen(comparison, name, found) for name in ("luffy", "sft")})
    assert [(run.title, run.config.evaluation.only) for run in runs[:2]] == [("luffy 11", None), ("sft 11", None)]


def test_an_arm_of_which_no_try_has_finished_is_shown_as_failed_with_every_reported_seed(comparison):
    found = tuning(comparison, {"luffy": (10, 30, 20)})
    assert _chosen(comparison, "sft", found) is None
    outcomes = {f"luffy-{seed}": FinishedSeed(seed, evaluation(easy=4), COSTS, ()) for seed in (11,)}
    outcomes["luffy-12"] = LuffyError("was ended\nits log")
    reported = ReportedRuns(outcomes, found)
    assert set(_arm(comparison, reported, "sft").failures) == {11, 12}
    assert "no point of its grid has finished" in _arm(comparison, reported, "sft").failures[11]
    luffy = _arm(comparison, reported, "luffy")
    assert ([seed.seed for seed in luffy.seeds], luffy.failures) == ([11], {12: "was ended"})


def test_every_try_has_the_outcomes_of_its_own_runs(comparison):
    outcomes = {run.folder: LuffyError("was ended") for run in comparison.tuning_runs}
    outcomes |= {
        f"luffy.{number}-100": FinishedSeed(100, evaluation(validation=right), COSTS, ())
        for number, right in ((1, 10), (2, 30))
    }
    found = tuned(comparison, outcomes, 0.95)
    assert (found.chosen("luffy").point.number, found.chosen("sft")) == (2, None)
    (luffy,) = (arm for arm in found.arms if arm.arm == "luffy")
    assert [(each.point.number, dict(each.failures)) for each in luffy.tries if each.failures] == [
        (3, {100: "was ended"})
    ]

"""From what was tried to what goes on to the next rung, and to what runs with the reported seeds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic.suite_scores import evaluation

from luffy.config.many_runs.comparison import load_comparison
from luffy.errors import LuffyError
from luffy.evaluation.method_comparison.arms import Costs, FinishedSeed
from luffy.evaluation.method_comparison.tuning import ArmTuning, Tuning, tried
from luffy.tasks.comparison import ReportedRuns, _arm, _chosen
from luffy.tasks.tuned_arms import tune_arms

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
            ArmTuning(arm, (tuple(
                tried(each.point, [FinishedSeed(100, evaluation(validation=right), COSTS, ())], {}, CELL, 0.95)
                if right is not None else tried(each.point, [], {100: "was ended"}, CELL, 0.95)
                for each, right in zip(comparison.candidates_of(arm), solved.get(arm, (None,) * 3), strict=True)
            ),))
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


@pytest.fixture(scope="module")
def halved():
    """Two arms with six tries each, of which three and then two go on."""
    rates = "[1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 4e-4]"
    constant = "[sft.num_traces=null, sft.batch_size=64, 'sft.optimizer.schedule={kind: constant}']"
    return load_comparison(
        "compare_tuned",
        [
            "select.halving={min_resource: 12}",
            f"grid={{rl.optimizer.lr: {rates}}}",
            f"arms.sft={{chain: sft, method: sft, overrides: {constant}, grid: {{sft.optimizer.lr: {rates}}}}}",
            *(f"arms.{arm}=null" for arm in ("on_policy", "rl_sft_loss", "sft_then_rl", "sft_then_luffy")),
        ],
    )


def climbed(comparison, solved):
    """The tuning where run `folder` solves `solved(folder)` problems (None: it fails), and the runs of each rung."""
    rungs = []

    def execute(runs):
        rungs.append(runs)
        return {run.folder: outcome(run, solved(run.folder)) for run in runs}

    def outcome(run, right):
        if right is None:
            return LuffyError("was ended")
        return FinishedSeed(run.seed, evaluation(validation=right), COSTS, ())

    return tune_arms(comparison, execute, 0.95), rungs


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_best_of_every_rung_go_on_and_the_best_of_the_last_one_is_chosen(halved, data):
    right = {}
    results = st.one_of(st.none(), st.integers(0, 40))
    found, rungs = climbed(halved, lambda folder: right.setdefault(folder, data.draw(results, label=folder)))
    for arm in found.arms:
        numbers = [[run.point.number for run in runs if run.arm == arm.arm] for runs in rungs]
        for number, (before, after) in enumerate(zip(numbers, [*numbers[1:], None], strict=True), start=1):
            scores = {point: right[f"{arm.arm}.{point}.rung{number}-100"] for point in before}
            ranked = sorted((point for point in before if scores[point] is not None), key=lambda each: -scores[each])
            if after is None:
                assert (arm.chosen and arm.chosen.point.number) == next(iter(ranked), None)
            else:
                assert after == sorted(ranked[: halved.rungs[number].num_tries])
    assert sum(map(len, rungs)) <= halved.num_tuning_runs


def test_a_rung_of_equal_tries_keeps_the_first_of_the_grid_and_says_so(halved):
    found, rungs = climbed(halved, lambda folder: 7)
    assert [sorted({run.point.number for run in runs}) for runs in rungs] == [[1, 2, 3, 4, 5, 6], [1, 2, 3], [1, 2]]
    assert found.chosen("luffy").point.number == 1
    assert "luffy: rung 1: of tries with equal accuracy, the first in the grid went on" in found.warnings

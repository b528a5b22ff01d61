"""What is chosen from the tries of an arm, and what is told of it."""

import json
from dataclasses import replace

import pytest
from synthetic.suite_scores import evaluation

from luffy.config.many_runs.comparison_config import BudgetConfig
from luffy.config.many_runs.grid import grid_points
from luffy.evaluation.method_comparison.arms import Arm, Costs, FinishedSeed
from luffy.evaluation.method_comparison.findings import as_json, find
from luffy.evaluation.method_comparison.tuning import ArmTuning, Tuning, tried
from luffy.report.cells import plain_table
from luffy.report.page import html
from luffy.report.sweep_pages import comparison_page, tries_table, tuning_costs
from luffy.tracking.metrics import METRICS_FILE, StepLines, metric_line

CELL = ("validation", "greedy")
COSTS = Costs(12.0, 96.0, 1000.0, 1500.0, 61.0, None)
RATES = {"rl.optimizer.lr": (1e-4, 2e-4, 4e-4)}


def finished(seed, solved, trained=None):
    return FinishedSeed(seed, evaluation(validation=solved), COSTS, (), trained=trained or {})


def tuned(arm, *solved, grid=RATES, failed=()):
    """One try for each number of solved problems, of which those in `failed` have failed."""
    points = zip(grid_points(grid), solved, strict=True)
    tries = tuple(
        tried(point, [finished(100, right)] if right not in failed else [],
              {100: "was ended"} if right in failed else {}, CELL, 0.95)
        for point, right in points
    )  # fmt: skip
    return ArmTuning(arm, tries)


def tuning(*arms):
    return Tuning("validation", "greedy", (100,), False, arms)


def test_the_highest_accuracy_is_chosen_and_of_equal_ones_the_first_in_the_grid():
    assert tuned("luffy", 10, 30, 20).chosen.point.text == "rl.optimizer.lr=0.0002"
    assert tuned("luffy", 10, 30, 30).chosen.point.text == "rl.optimizer.lr=0.0002"
    assert tuned("luffy", 0, 0, 0).chosen.point.text == "rl.optimizer.lr=0.0001"


def test_the_mean_over_seeds_decides_and_a_try_with_a_failed_seed_is_not_chosen():
    first, second = grid_points({"a": (1, 2)})
    lucky = tried(first, [finished(100, 40), finished(101, 0)], {}, CELL, 0.95)
    steady = tried(second, [finished(100, 22), finished(101, 20)], {}, CELL, 0.95)
    assert ArmTuning("luffy", (lucky, steady)).chosen is steady
    half = tried(first, [finished(100, 40)], {101: "was ended"}, CELL, 0.95)
    assert half.score is None
    assert ArmTuning("luffy", (half, steady)).chosen is steady
    assert ArmTuning("luffy", (half,)).chosen is None


@pytest.mark.parametrize(
    ("solved", "says"),
    [
        ((30, 20, 10), "the smallest value tried; a smaller one"),
        ((10, 20, 30), "the largest value tried; a larger one"),
    ],
)
def test_a_value_at_the_edge_of_what_was_tried_is_warned_of(solved, says):
    (line,) = tuned("luffy", *solved).warnings
    assert line.startswith("luffy: rl.optimizer.lr=") and says in line


def test_tries_that_are_all_equal_choose_nothing_and_say_so():
    (line,) = tuned("luffy", 0, 0, 0).warnings
    assert "all tried points are equally accurate" in line
    assert tuned("luffy", 20, 20, 20, failed=(20,)).warnings == []


def test_only_numbers_have_edges_in_whatever_order_they_were_tried():
    assert tuned("luffy", 10, 30, 20).warnings == []
    assert tuned("luffy", 30, 20, 10, grid={"rl.optimizer.lr": (2e-4, 1e-4, 4e-4)}).warnings == []
    assert tuned("sft", 30, 20, grid={"sft.optimizer.schedule.kind": ("cosine", "constant")}).warnings == []
    assert tuned("sft", 30, 20, grid={"rl.critic.x": (True, False)}).warnings == []
    two = {"rl.optimizer.lr": (1e-4,), "rl.group": (2, 4)}
    assert [line.partition("=")[0] for line in tuned("luffy", 10, 30, grid=two).warnings] == ["luffy: rl.group"]


def trained(folder, steps=1, seconds=1.0):
    """A stage of that name that has made so many steps."""
    rl = {"batch/optimizer_steps": 2.0, "rollout/num_drawn": 7.0, "rollout/tokens_drawn": 70.0}
    folder.mkdir()
    writer = StepLines(folder / METRICS_FILE)
    for step in range(1, steps + 1):
        own = {} if folder.name == "sft" else rl
        writer.append(metric_line(step, {"batch/response_tokens": 10.0, "perf/step_s": seconds, **own}))
    writer.close()
    return folder


def test_a_stage_that_tries_share_costs_once(tmp_path):
    for name, seconds in (("sft", 5.0), ("one", 2.0), ("two", 3.0)):
        trained(tmp_path / name, seconds=seconds)
    tries = [
        tried(point, [finished(100, 4, {"sft": tmp_path / "sft", "rl": tmp_path / name})], {}, CELL, 0.95)
        for point, name in zip(grid_points({"a": (1, 2)}), ("one", "two"), strict=True)
    ]
    assert ArmTuning("luffy", tuple(tries)).costs == Costs(1 + 2 * 2, 14.0, 140.0, 30.0, 10.0, None)


def test_page_and_data_tell_what_was_tried_chosen_and_failed():
    arms = tuned("sft", 30, 20, 10), tuned("luffy", 10, 30, 20, failed=(20,))
    reported = [
        Arm(name, "rl", name, (FinishedSeed(1, evaluation(easy=20), COSTS, ()),), {}) for name in ("sft", "luffy")
    ]
    found = find("s", BudgetConfig(optimizer_steps=4), "luffy", (1,), evaluation(easy=4), reported, tuning(*arms))
    _, rows = plain_table(tries_table(found.tuning))
    assert [row[3] for row in rows] == ["chosen", "", "", "", "chosen", ""]
    assert rows[5][2] == "failed"
    assert found.failures == ["luffy, rl.optimizer.lr=0.0004, seed 100: was ended"]
    page = html(comparison_page(found))
    for words in ("3 tries", "seed 100", "evaluated only on validation", "smallest value tried", "rl.optimizer.lr"):
        assert words in page
    data = json.loads(as_json(found))["tuning"]
    assert [each["chosen"] for each in data["arms"]] == [{"rl.optimizer.lr": 1e-4}, {"rl.optimizer.lr": 2e-4}]
    assert data["arms"][0]["tries"][0]["accuracy"]["value"] == pytest.approx(30 / 40)
    assert data["arms"][1]["tries"][2] == {
        "values": {"rl.optimizer.lr": 4e-4}, "accuracy": None, "failures": {"100": "was ended"},
    }  # fmt: skip
    assert data["warnings"] == arms[0].warnings
    assert len(plain_table(tuning_costs(found.tuning))[1]) == 2
    untuned = replace(found, tuning=None)
    assert json.loads(as_json(untuned))["tuning"] is None and "#tuning" not in html(comparison_page(untuned))

"""The page and the data of a grid, on points whose verdicts are chosen."""

import json
import re

from synthetic.suite_scores import evaluation

from luffy.config.many_runs.grid import grid_points
from luffy.config.many_runs.grid_experiment import GridConfig
from luffy.evaluation.grid_findings import GridFindings, PointResult, grid_json
from luffy.evaluation.method_comparison.arms import Costs, FinishedSeed
from luffy.report.cells import plain_table
from luffy.report.page import html
from luffy.report.sweep_pages import grid_costs, grid_page, grid_table

COSTS = Costs(12.0, 96.0, 1000.0, 1500.0, 61.0, None)
SIZES = {"sft.num_traces": (64, 128, 256)}
SHADE = r"fill: var\(--c1\); opacity: ([\d.]+)"
RATES = {"sft.optimizer.lr": (1e-4, 1e-3)}


def found(grid, solved, failed=(), seeds=(1, 2)):
    """With `solved[i]` problems solved by the first seed at point i, and two more by the second."""
    config = GridConfig(name="sizes", experiment="smoke", grid=grid, seeds=seeds)
    results = []
    for point, right in zip(grid_points(grid), solved, strict=True):
        done = () if point.number in failed else seeds
        finished = (
            FinishedSeed(seed, evaluation(easy=right + 2 * i, hard=right // 2), COSTS, ())
            for i, seed in enumerate(done)
        )
        lost = {seed: "was ended" for seed in seeds if seed not in done}
        results.append(PointResult(point, tuple(finished), lost))
    return GridFindings(config, tuple(results))


def test_one_key_is_a_line_with_intervals_for_each_suite():
    page = html(grid_page(found(SIZES, (10, 20, 30))))
    assert page.count("<figure>") == 2 and page.count("<use") == 2 * 3
    assert all(f">{value}<" in page for value in (64, 128, 256))
    assert "http://" not in page.replace("http://www.w3.org", "")
    _, rows = plain_table(grid_table(found(SIZES, (10, 20, 30)), "greedy"))
    assert [row[1].partition(" ")[0] for row in rows] == ["27.5", "52.5", "77.5"]  # mean over two seeds
    assert rows[0][1].endswith("(25.0, 30.0)")


def test_two_keys_are_a_map_with_a_row_for_each_value_of_the_first():
    page = html(grid_page(found(SIZES | RATES, (10, 20, 30, 12, 22, 32))))
    (easy, _) = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(re.findall(SHADE, page)) == 2 * 6
    shown = re.findall(r">([\d.]+)</text>", easy)
    assert shown == ["0.0001", "0.001", "64", "128", "256", "27.5", "52.5", "77.5", "32.5", "57.5", "82.5"]
    assert max((float(shade), place) for place, shade in enumerate(re.findall(SHADE, easy)))[1] == 5


def test_three_keys_are_a_table():
    grid = SIZES | RATES | {"sft.batch_size": (4,)}
    page = html(grid_page(found(grid, (10, 20, 30, 12, 22, 32))))
    assert "<figure>" not in page and "sft.num_traces=64, sft.optimizer.lr=0.0001, sft.batch_size=4" in page


def test_a_failed_point_leaves_a_gap():
    findings = found(SIZES | RATES, (10, 20, 30, 12, 22, 32), failed=(2,))
    page = html(grid_page(findings))
    assert len(re.findall(SHADE, page)) == 2 * 5 and "Failed runs" in page
    assert findings.failures[0] == "sft.num_traces=64, sft.optimizer.lr=0.001, seed 1: was ended"
    assert html(grid_page(found(SIZES, (10, 20, 30), failed=(2,)))).count("<use") == 2 * 2
    assert plain_table(grid_costs(findings))[1][1][1:] == ["–"] * 5


def test_a_grid_of_which_nothing_has_finished_still_says_why():
    page = html(grid_page(found(SIZES, (10, 20, 30), failed=(1, 2, 3))))
    assert "Failed runs" in page and "<figure>" not in page


def test_with_one_seed_the_page_says_that_nothing_is_known_of_another():
    assert "say nothing about what another seed would give" in html(grid_page(found(SIZES, (10, 20, 30), seeds=(1,))))


def test_the_data_hold_what_the_page_says():
    first, *_ = json.loads(grid_json(found(SIZES, (10, 20, 30))))["points"]
    assert first["values"] == {"sft.num_traces": 64}
    assert first["accuracy"][0]["by_seed"] == {"1": 0.25, "2": 0.3}
    assert first["cost_a_seed"]["seconds"] == 61.0

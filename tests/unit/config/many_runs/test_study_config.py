"""A design's cells, runs and planned tests, and its mistakes in one line."""

import re
from pathlib import Path

import pytest

from luffy.config.many_runs.study import distinct, load_study
from luffy.errors import ConfigError

ROOT = Path(__file__).parents[4]
SMOKE = (ROOT / "exp_configs" / "study_smoke.yaml").read_text().replace("smoke.yaml", f"{ROOT}/exp_configs/smoke.yaml")
DESIGN = ROOT / "docs" / "study" / "design.yaml"


def changed(folder, old, new):
    assert old in SMOKE
    path = folder / "design.yaml"
    path.write_text(SMOKE.replace(old, new))
    return path


def test_cells_are_the_centre_every_other_level_and_the_interactions():
    cells = load_study("study_smoke").cells
    assert cells == {
        "centre": {"budget": "short", "heat": "warm"},
        "budget-long": {"budget": "long", "heat": "warm"},
        "heat-cool": {"budget": "short", "heat": "cool"},
        "long_cool": {"budget": "long", "heat": "cool"},
    }


def test_each_cell_has_its_seeds_and_levels_and_equal_runs_count_once():
    study = load_study("study_smoke")
    runs = study.reported_runs(study.cells, study.first_points())
    assert len(runs) == 2 * 2 + 3 * 2
    assert len(distinct(runs)) == 8  # SFT has no rollouts, so that their temperature changes nothing
    of = {(run.cell, run.run.arm, run.run.seed): run.run.config for run in runs}
    assert {of[cell, "luffy", 1].rl.steps for cell in ("centre", "heat-cool")} == {1}
    assert {of[cell, "luffy", 1].rl.steps for cell in ("budget-long", "long_cool")} == {2}
    assert [of[cell, "luffy", 1].rl.temperature for cell in study.cells] == [1.0, 1.0, 0.8, 0.8]


def test_values_chosen_at_the_centre_hold_in_every_cell():
    study = load_study("study_smoke")
    assert len(study.tuning_runs(["heat-cool"])) == 2 * 2
    runs = study.reported_runs(study.cells, {"centre": {"luffy": 2}})
    assert {run.run.arm for run in runs} == {"luffy"}  # nothing is chosen for SFT yet
    assert {(run.point.number, run.run.config.rl.optimizer.lr) for run in runs} == {(2, 3e-3)}


def test_every_cell_can_tune_its_own(tmp_path):
    study = load_study(changed(tmp_path, "tuned_at: centre", "tuned_at: cell"))
    tuning = study.tuning_runs(study.cells)
    assert len(tuning) == 4 * 4
    runs = study.reported_runs(study.cells, {"heat-cool": {"luffy": 2}})
    assert {run.cell for run in runs} == {"heat-cool"}


@pytest.mark.parametrize(
    ("name", "noun"), [("smoke", "an experiment"), ("compare_arithmetic", "a comparison of methods")]
)
def test_a_file_of_another_kind_is_no_study(name, noun):
    with pytest.raises(ConfigError, match=f"{name}: is {noun}, not a study; run it with: luffy (run|compare) {name}"):
        load_study(name)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cells: [centre, budget-long]", "cells: [budget-huge]", "no cell is called 'budget-huge'"),
        ("arms: [luffy]}", "arms: [chord]}", "no arm is called 'chord'"),
        ("reference: sft", "reference: ppo", "no arm is called 'ppo'"),
        ("{budget: long, heat: cool}", "{budget: long, cold: cool}", "no axis is called 'cold'"),
        ("{budget: long, heat: cool}", "{budget: long, heat: hot}", "axis heat has no level 'hot'"),
        ("seeds: [100]}", "seeds: [1]}", "1 is also reported"),
        ("[rl.temperature=0.8]", "[rl.steps=9]", "it would change the budget"),
        ("suite: in_distribution", "suite: nowhere", "no suite is called 'nowhere'"),
        ("method: luffy, grid", "method: lufy, grid", "did you mean 'luffy'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, old, new, message):
    path = changed(tmp_path, old, new)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        study = load_study(path)
        study.check(study.cells)
    assert "\n" not in str(caught.value)


@pytest.mark.slow  # loads every arm in every cell
def test_the_design_page_counts_what_the_design_has():
    study = load_study(DESIGN)
    study.check(study.cells)
    text = " ".join(DESIGN.with_suffix(".md").read_text().split())
    tuning = len(distinct(study.tuning_runs(study.cells)))
    reported = len(distinct(study.reported_runs(study.cells, study.first_points())))
    config = study.config
    assert f"| cells | {len(study.cells)}: " in text
    assert f"| runs | {tuning + reported}: {tuning} to tune, {reported} to report |" in text
    assert f"| seeds | {len(config.seeds)} at the centre, {len(config.seeds_elsewhere)} in every other cell |" in text
    assert f"There are {len(config.planned)} planned tests" in text
    assert tuning + reported <= 400

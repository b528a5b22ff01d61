"""A study's numbers out of its parquet alone: Holm over planned tests, tables, and what two results differ in."""

import re
from dataclasses import replace

import numpy as np
import pytest

from luffy.config.many_runs.study import load_study
from luffy.errors import DataError
from luffy.evaluation.study.study_findings import find_effects
from luffy.evaluation.study.study_results import (
    BASE,
    REPORTED,
    MeasureRow,
    OutcomeRow,
    StudyResults,
    first_difference,
    joined_results,
    read_study_results,
    result_files,
    write_results,
)
from luffy.report.sweep_pages import accuracies_of_cells, decision_table, study_figure, study_html, study_markdown

PRIMARY = ("in_distribution", "greedy")
SHARES = {"": 0.2, "sft": 0.3, "luffy": 0.8}


def outcome(cell, arm, seed):
    rng = np.random.default_rng([seed, len(cell), len(arm)])
    share = 0.3 if (cell, arm) == ("heat-cool", "luffy") else SHARES[arm]
    correct = tuple((rng.random(80) < share).astype(int).tolist())
    return OutcomeRow(cell, REPORTED if arm else BASE, arm, 1, seed, *PRIMARY, "same", 1, correct)


@pytest.fixture
def study():
    return load_study("study_smoke")


@pytest.fixture
def results(study):
    rows = [outcome(cell, "", 0) for cell in study.cells]
    rows += [
        outcome(cell, arm, seed) for cell in study.cells for arm in study.config.arms for seed in study.seeds(cell)
    ]
    measures = [
        MeasureRow(row.cell, row.role, row.arm, 1, "", row.seed, *PRIMARY, "accuracy", float(np.mean(row.correct)))
        for row in rows
    ]
    return StudyResults(tuple(sorted(measures)), tuple(sorted(rows)))


def test_holm_is_over_the_planned_tests_alone(study, results):
    findings = find_effects(study, results)
    planned = {each: findings.effect(*each) for each in study.config.planned}
    raw = sorted(effect.result.p_value for effect in planned.values())
    expected = np.maximum.accumulate([p * (len(raw) - i) for i, p in enumerate(raw)])
    assert sorted(effect.adjusted_p for effect in planned.values()) == pytest.approx(np.minimum(expected, 1.0))
    others = [effect for (cell, arm, _), effect in findings.effects.items() if (cell, arm) not in planned]
    assert others and all(effect.adjusted_p is None for effect in others)
    assert findings.effect("centre", "luffy").verdict == "ahead"
    assert findings.effect("heat-cool", "luffy").verdict == "not distinguishable"


def test_a_planned_test_without_results_counts_in_the_correction(study, results):
    cut = replace(results, outcomes=tuple(row for row in results.outcomes if row.cell != "budget-long"))
    findings = find_effects(study, cut)
    assert findings.missing == [("budget-long", "luffy")]
    effect = findings.effect("centre", "luffy")
    assert effect.adjusted_p == pytest.approx(2 * effect.result.p_value)


def test_arms_of_a_cell_need_the_same_problems(study, results):
    rows = tuple(replace(row, problems="others") if row.arm == "luffy" else row for row in results.outcomes)
    with pytest.raises(DataError, match="not the problems of the reference"):
        find_effects(study, replace(results, outcomes=rows))


def test_a_table_of_the_page_is_what_the_parquet_says(study, results, tmp_path):
    files = result_files(tmp_path / "design.yaml", "small")
    write_results(results, files)
    read = read_study_results(files)
    assert read == results
    table = accuracies_of_cells(find_effects(study, read), PRIMARY)
    assert table.header == ("situation", "base", "sft", "luffy")
    for cell, row in zip(study.cells, table.rows, strict=True):
        for arm, shown in zip(table.header[1:], row[1:], strict=True):
            own = [each for each in results.outcomes if (each.cell, each.arm or "base") == (cell, arm)]
            assert shown.text == f"{100 * np.mean([each.correct for each in own]):.1f}"


def test_the_page_says_what_is_exploratory_and_what_is_not_distinguishable(study, results):
    findings = find_effects(study, results)
    centre, _, cool, _ = decision_table(findings).rows
    assert centre[1].text.startswith("luffy (+") and "exploratory" not in centre[1].text
    assert cool[1].text == "–" and "exploratory" in cool[3].text
    html, markdown = study_html(findings, results), study_markdown(findings, results)
    assert html.count("<figure>") == 2 and study.config.limits[0] in html and study.config.limits[0] in markdown
    figure = study_figure(findings)
    assert figure.count("<svg ") == 1 and not re.search(r"var\(", figure)


def test_results_that_differ_in_one_answer_are_found(results):
    assert first_difference(results, results) is None
    first, *rest = results.outcomes
    wrong = replace(first, correct=(1 - first.correct[0], *first.correct[1:]))
    found = first_difference(replace(results, outcomes=(wrong, *rest)), results)
    assert found.startswith(f"{first.cell}, ") and "committed" in found and "\n" not in found
    assert "now nothing" in first_difference(results, replace(results, outcomes=tuple(rest)))


def of_seeds(results, *seeds):
    return StudyResults(
        *(tuple(row for row in rows if row.seed in seeds) for rows in (results.measures, results.outcomes))
    )


def test_machines_add_their_runs_to_the_same_files(results):
    one, other = of_seeds(results, 0, 1), of_seeds(results, 0, 2)
    assert joined_results(one, other) == joined_results(other, one) == results
    assert joined_results(results, one) == results  # fewer runs replace nothing
    slower = tuple(replace(row, measure="seconds", value=row.value + 1) for row in one.measures)
    timed = tuple(replace(row, measure="seconds") for row in one.measures)
    joined = joined_results(replace(one, measures=timed), replace(one, measures=slower))
    assert joined.measures == timed  # a time is no difference


def test_runs_that_differ_are_not_joined(results):
    first, *rest = results.outcomes
    other = replace(results, outcomes=(replace(first, correct=(1 - first.correct[0], *first.correct[1:])), *rest))
    with pytest.raises(DataError, match=f"{first.cell}, .* committed .*, now "):
        joined_results(results, other)
    again = tuple(replace(row, point=2) if row.arm == "luffy" else row for row in results.outcomes)
    with pytest.raises(DataError, match=r"centre, luffy: point 1 of its grid was reported, here it is point 2"):
        joined_results(of_seeds(results, 0, 1), of_seeds(replace(results, outcomes=again), 0, 2))


def test_rows_that_the_design_no_longer_has_are_left_out(study, results):
    gone = tuple(replace(row, cell="old") for row in results.outcomes)
    assert StudyResults((), (*results.outcomes, *gone)).in_design(study).outcomes == results.outcomes


def test_a_file_that_is_not_parquet_is_one_line(tmp_path):
    files = result_files(tmp_path / "design.yaml", "small")
    with pytest.raises(DataError, match="no such file; luffy study --collect"):
        read_study_results(files)
    for file in files:
        file.write_text("nothing")
    with pytest.raises(DataError, match="is not a parquet file"):
        read_study_results(files)

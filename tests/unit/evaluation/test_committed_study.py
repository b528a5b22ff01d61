"""The study in docs/study: its page is what the committed results say."""

import re
from pathlib import Path

import numpy as np
import pytest

from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.evaluation.across_runs.run_results import read_sweep_results, result_files
from luffy.evaluation.across_runs.sweep_findings import find
from luffy.report.page import html
from luffy.report.sweep_pages import study_figure, study_markdown, study_page

FOLDER = Path(__file__).parents[3] / "docs" / "study" / "first"
ARMS = ("sft", "on_policy", "sft_then_rl", "luffy")
CELLS = {
    "1/16": "traced-sixteenth",
    "1/4": "centre",
    "all": "traced-all",
    "1/4, 20 % of them wrong": "wrong-fifth",
    "1/4, 40 % of them wrong": "wrong-two_fifths",
    "1/4, 40 % of them wrong, 96 steps": "wrong_long",
    "1/4, the base never reasons": "base-never",
    "1/16, the base never reasons": "few_traces_never",
    "1/4, the base often reasons": "base-often",
}
THIRD_MACHINE = {
    "another notation": "style-equations",
    "every step twice": "style-checked",
    "two traces a prompt": "style-both",
    "own steps, 96 steps": "budget-long",
}


def table_of(section):
    """The cells of the one table of a section of the findings, row by row; the second row are dashes."""
    _, _, text = (FOLDER / "findings.md").read_text(encoding="utf-8").partition(f"\n## {section}\n")
    lines = text.partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "|" in line]


OTHER_BASE = {"own steps": "centre", **THIRD_MACHINE}


def effect_words(effect):
    """The difference in percentage points with its interval, without a correction for many tests."""
    found = effect.result.difference
    return f"{100 * found.value:+.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


@pytest.fixture(scope="module")
def study():
    return load_sweep(str(FOLDER / "design.yaml"))


@pytest.fixture(scope="module")
def results(study):
    return read_sweep_results(result_files(study.path, study.design.name))


@pytest.mark.parametrize("design", ["design.yaml", "styles_and_length.yaml"])
def test_the_committed_page_figure_and_tables_come_out_of_the_committed_results(design):
    study = load_sweep(str(FOLDER / design))
    results = read_sweep_results(result_files(study.path, study.design.name))
    findings, name = find(study, results), study.design.name
    made = {".html": html(study_page(findings, results)), ".results.md": study_markdown(findings, results)}
    made[".svg"] = study_figure(findings)
    for suffix, text in made.items():
        assert (FOLDER / f"{name}{suffix}").read_text(encoding="utf-8") == text, f"luffy compare --page: {suffix}"


def accuracy(results, cell, arm):
    """The mean over seeds and problems of the reported runs, in percent, as pages write it."""
    measured = {"suite": ["in_distribution"], "decoding": ["greedy"]}
    own = results.where(cell=[cell], arm=[arm], role=["reported", "base"], **measured).outcomes
    return f"{100 * float(np.mean([*own['correct']])):.1f}"


@pytest.mark.parametrize(
    ("page", "num_rows"), [(FOLDER / "findings.md", len(CELLS)), (FOLDER.parents[2] / "README.md", 3)]
)
def test_accuracies_in_the_prose_are_the_mean_over_seeds_and_problems(results, page, num_rows):
    rows = dict(re.findall(r"^\| (.*?) \| (\d+\.\d \[.*)$", page.read_text(encoding="utf-8"), re.MULTILINE))
    shown = {cell: rows[label] for label, cell in CELLS.items() if label in rows}
    assert len(shown) == num_rows
    for cell, text in shown.items():
        written = [each.split()[0] for each in text.split(" | ")[: len(ARMS)]]
        assert written == [accuracy(results, cell, arm) for arm in ARMS], cell


def test_the_effects_on_a_second_machine_are_those_of_its_committed_results(study, results):
    again = find(study, read_sweep_results(result_files(study.path, "second_machine")))
    first = find(study, results)
    header, *rows = table_of("Run again on another machine")
    cells = [text.split("`")[1] for text in header[1::2]]
    assert [row[0] for row in rows[1:]] == [f"`{arm}`" for arm in study.design.others]
    for arm, row in zip(study.design.others, rows[1:], strict=True):
        assert row[1:] == [effect_words(side.effect(cell, arm)) for cell in cells for side in (first, again)], arm


@pytest.mark.parametrize(
    ("results_of", "section", "cells"),
    [
        ("third_machine", "The other four cells, on a third machine", THIRD_MACHINE),
        ("styles_and_length", "The styles and a longer budget, from another base", OTHER_BASE),
    ],
)
def test_accuracies_from_other_bases_are_those_of_their_committed_results(study, results_of, section, cells):
    results = read_sweep_results(result_files(study.path, results_of))
    header, _, *rows = table_of(section)
    arms = [text.strip("`").replace("base", "") for text in header[1:]]
    assert set(arms) >= set(ARMS)
    assert [row[0] for row in rows] == list(cells)
    for label, *written in rows:
        assert written == [accuracy(results, cells[label], arm) for arm in arms], label


def test_the_effects_of_guided_methods_are_those_of_their_committed_results():
    study = load_sweep(str(FOLDER / "guided_methods.yaml"))
    findings = find(study, read_sweep_results(result_files(study.path, study.design.name)))
    header, _, *rows = table_of("Eight guided methods from a base that RL teaches alone")
    assert header == ["steps", *(f"`{arm}`" for arm in study.design.others)]
    for (steps, *row), cell in zip(rows, ("centre", "steps-third"), strict=True):
        assert steps == {"centre": "48", "steps-third": "16"}[cell]
        assert row == [effect_words(findings.effect(cell, arm)) for arm in study.design.others]

"""The studies in docs/study: their pages, figures and prose, and README, are what the committed results say."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.evaluation.across_runs.run_results import read_sweep_results, result_files
from luffy.evaluation.across_runs.sweep_findings import find
from luffy.report.page import html
from luffy.report.sweep_pages import study_figure, study_page

FOLDER = Path(__file__).parents[3] / "docs" / "study"
README = FOLDER.parents[1] / "README.md"
STUDY, FIRST = FOLDER / "design.yaml", FOLDER / "first" / "design.yaml"
AGAIN = FOLDER / "other_instructions.yaml"


def tables_of(page):
    """The tables of a Markdown file: the cells of each row, without the dashes."""
    blocks = re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE)
    rows = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()] for block in blocks]
    return [[row for row in table if set("".join(row)) != {"-"}] for table in rows]


def arms_of(header):
    return [text.strip("`").replace("base", "") for text in header if text.startswith("`")]


@functools.cache
def loaded(design):
    study = load_sweep(design)
    results = read_sweep_results(result_files(study.path, study.design.name))
    return study, results, find(study, results)


def cells_of(study):
    """The name of each cell by its label."""
    return {cell.label: name for name, cell in study.design.cells.items()}


def accuracy(results, cell, arm):
    """The mean over seeds and problems of the reported runs, in percent, as pages write it."""
    measured = {"suite": ["in_distribution"], "decoding": ["greedy"]}
    own = results.where(cell=[cell], arm=[arm], role=["reported", "base"], **measured).outcomes
    return f"{100 * float(np.mean([*own['correct']])):.1f}"


def points(effect):
    """The difference in percentage points with its interval, without a correction for many tests."""
    found = effect.result.difference
    return f"{100 * found.value:+.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def test_the_committed_page_and_figure_come_out_of_the_committed_results():
    study, results, findings = loaded(STUDY)
    name = study.design.name
    for suffix, text in {".html": html(study_page(findings, results)), ".svg": study_figure(findings)}.items():
        assert (FOLDER / f"{name}{suffix}").read_text(encoding="utf-8") == text, f"luffy compare --page: {suffix}"


@pytest.mark.parametrize(
    ("page", "design", "corner"),
    [
        (FOLDER / "findings.md", STUDY, "situation"),
        (README, STUDY, "situation"),
        (FOLDER / "findings.md", AGAIN, "on AVX2"),
    ],
)
def test_the_study_in_prose_is_what_its_results_say(page, design, corner):
    """Accuracies are means over bases and problems; differences and their p-values those of planned tests."""
    study, results, findings = loaded(design)
    tables = [table for table in tables_of(page) if table[0][0] == corner]
    assert tables
    for header, *rows in tables:
        for label, *written in rows:
            for what, text in zip(header[1:], written, strict=True):
                where = cells_of(study)[label], *re.findall(r"`(\w+)`", what)
                if " minus " not in what:
                    cell, arm = where if len(where) == 2 else (*where, "")
                    assert text.split()[0] == accuracy(results, cell, arm), where
                    continue
                effect = findings.effect(where[0], where[1], against=where[2])
                assert effect.is_planned, where
                p = "p < 0.001" if effect.p_value < 0.001 else f"p = {effect.p_value:.2g}"
                assert text.replace("**", "") == f"{points(effect)}, {p}", where
                assert ("**" in text) == effect.is_significant, where


def test_on_other_instructions_accuracies_lie_within_the_intervals_and_differences_as_the_page_says():
    (_, _, first), (study, _, again) = loaded(STUDY), loaded(AGAIN)
    measured = first.measured[0]
    for cell, arm in ((cell, arm) for cell in study.cells for arm in ("", *study.design.arms)):
        interval = first.score(arm, measured, cell).estimate
        assert interval.low <= again.score(arm, measured, cell).estimate.value <= interval.high, (cell, arm)
    compared = [(cell, arm) for cell in study.cells for arm in study.design.others]
    pairs = [*((*each, "on_policy") for each in compared), *study.design.planned]
    outside, page = set(), (FOLDER / "findings.md").read_text(encoding="utf-8")
    for cell, arm, against in pairs:
        interval = first.effect(cell, arm, against=against).result.difference
        found = again.effect(cell, arm, against=against).result.difference.value
        if not interval.low <= found <= interval.high:
            outside.add((cell, arm, against))
            assert f"({100 * found:+.1f}" in page
    assert len(pairs) == 8
    assert outside == {
        ("centre", "sft_then_rl", "on_policy"),
        ("centre", "sft_then_rl", "sft"),
        ("centre", "luffy", "on_policy"),
    }


def test_the_first_study_in_prose_is_what_its_results_say():
    page = FOLDER / "first.md"
    main, guided = tables_of(page)
    study, results, _ = loaded(FIRST)
    header, *rows = main
    for label, *written in rows:
        shown = [accuracy(results, cells_of(study)[label], arm) for arm in arms_of(header)]
        assert [text.split()[0] for text in written] == shown, label
    study, _, findings = loaded(FIRST.with_name("guided_methods.yaml"))
    header, *rows = guided
    assert arms_of(header) == [*study.design.others]
    for row, cell in zip(rows, ("centre", "steps-third"), strict=True):
        assert row[1:] == [points(findings.effect(cell, arm)) for arm in study.design.others]
    _, results, findings = loaded(FIRST.with_name("styles_and_length.yaml"))
    prose = page.read_text(encoding="utf-8")
    for cell, arm in (("centre", "sft"), ("style-equations", "sft"), ("style-equations", "on_policy")):
        assert f" {accuracy(results, cell, arm)}" in prose, (cell, arm)
    for cell in ("style-equations", "style-checked", "style-both"):
        difference = findings.effect(cell, "sft_then_rl", against="sft").result.difference.value
        assert f" {100 * abs(difference):.1f} " in prose, cell

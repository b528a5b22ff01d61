"""What runs have spent, what grids, comparisons and studies find on arms whose verdicts are chosen, and how pages and
data say it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from support.refusals import refused
from synthetic.evaluated_workspace import first, write_evaluation
from synthetic.finished_chain import HOSTILE
from synthetic.pages import stands_alone
from synthetic.sweeps import COSTS, arm, compared, evaluation, gridded, run

from luffy.config.many_runs.sweep_design import ONLY_CELL, PlannedConfig
from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.errors import DataError, LuffyError
from luffy.evaluation.across_runs.run_results import (
    BASE,
    REPORTED,
    ArmResults,
    Costs,
    CurvePoint,
    SweepResults,
    costs_together,
    first_difference,
    in_order,
    joined_results,
    read_run,
    read_sweep_results,
    result_files,
    write_results,
)
from luffy.evaluation.across_runs.sweep_findings import arms_of, choose, find, findings_json, tuning_of
from luffy.pipeline.workspace import Workspace
from luffy.report import sweep_pages as pages
from luffy.report.page import html
from luffy.tracking.metrics import HeldOutPoint

EASY, HARD = ("easy", "greedy"), ("hard", "greedy")
CURVE = (CurvePoint(0.25, 2.0, 8.0, 2.0), CurvePoint(0.75, 4.0, 16.0, 5.0))
LUFFY = arm("luffy", (20, 10), (24, 10), curve=CURVE)
OTHER = arm("other", (36, 10), (40, 12))


def measured(name, *curves):
    """An arm whose seeds had these accuracies on the way, four optimizer steps apart, each give or take 0.05."""
    plain, seeds = arm(name, *[(20, 10)] * len(curves)), []
    for seed, curve in zip(plain.seeds, curves, strict=True):
        points = (HeldOutPoint(at, at - 0.05, at + 0.05, 4.0 * i, 32.0 * i, 9.0 * i) for i, at in enumerate(curve))
        seeds.append(replace(seed, held_out={"easy": tuple(points)}))
    return replace(plain, seeds=tuple(seeds))


FAST = measured("luffy", (0.1, 0.4, 0.6), (0.1, 0.2, 0.5))


def page_of(findings):
    page = html(pages.sweep_page(findings))
    stands_alone(page)
    return page


def data_of(findings):
    return json.loads(findings_json(findings))


# What runs have spent and learned, from the files of their stages.

SFT_ROWS = [{"batch/num_rows": 4.0, "batch/response_tokens": 44.0, "perf/step_s": 1.0}]
RL_ROW = {
    "reward/mean": 0.25, "batch/optimizer_steps": 2.0, "batch/num_rows": 8.0, "batch/response_tokens": 80.0,
    "rollout/num_drawn": 7.0, "rollout/tokens_drawn": 70.0, "perf/step_s": 2.0, "perf/peak_memory_gib": 1.5,
}  # fmt: skip
CHANGED = {
    "batch/response_tokens": 96.0,
    "rollout/tokens_drawn": 84.0,
    "perf/step_s": 3.0,
    "perf/peak_memory_gib": 1.75,
}
RL_ROWS = [RL_ROW, {**RL_ROW, "reward/mean": 0.75, **CHANGED}]


@pytest.fixture
def stages(tmp_path):
    """`stages(sft_2=rows)`: directories of stages, of that kind, that have logged these rows, and of an evaluation."""
    evaluation = write_evaluation(Workspace(tmp_path), "e", {EASY: first(4)}, checkpoint="rl")

    def logged(**rows):
        own = {name: tmp_path / name.partition("_")[0] / name for name in rows}
        for name, of_stage in rows.items():
            own[name].mkdir(parents=True)
            lines = (json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(of_stage, start=1))
            (own[name] / "metrics.jsonl").write_text("".join(lines))
        return {**own, "evaluate_rl": evaluation}

    return logged


def read(stages):
    return read_run(SimpleNamespace(seed=3, last="rl"), stages)


def test_costs_and_curves_count_the_cold_start_and_go_on_in_a_second_stage(stages):
    found, unknown = read(stages(sft=SFT_ROWS, rl=RL_ROWS)), [RL_ROW, {"reward/mean": 1.0}]
    assert found.costs == Costs(1 + 2 * 2, 14.0, 154.0, 44.0 + 176.0, 6.0, 1.75)
    assert found.curve == (CurvePoint(0.25, 1 + 2, 12.0, 3.0), CurvePoint(0.75, 1 + 4, 20.0, 6.0))
    again = read(stages(sft_2=SFT_ROWS, rl_2=RL_ROWS[:1], rl_3=RL_ROWS[1:]))
    assert (again.costs, again.curve) == (found.costs, found.curve)
    assert read(stages(rl_4=unknown)).costs.generated_tokens is None, "a cost that a step does not know is not guessed"


def test_measurements_on_the_way_count_what_all_stages_had_spent_and_are_no_steps_of_training(stages):
    plain = read(stages(sft=SFT_ROWS, rl=RL_ROWS))
    names = ("accuracy", "accuracy_low", "accuracy_high")
    on = [{"val/accuracy": 0.0} | {f"val/a/{name}": i + 0.1 * n for n, name in enumerate(names)} for i in range(4)]
    sft = [{"step": 0, **on[0]}, {"step": 1, **SFT_ROWS[0], **on[1]}]
    found = read(
        stages(sft_2=sft, rl_2=[{"step": 0, **on[2]}, {"step": 1, **RL_ROWS[0]}, {"step": 2, **RL_ROWS[1], **on[3]}])
    )
    assert (found.costs, found.curve, found.seed) == (plain.costs, plain.curve, 3)
    points = found.held_out["a"]
    assert [(point.steps, point.samples, point.seconds) for point in points] == [
        (0, 0, 0),
        (1, 4, 1),
        (1, 4, 1),
        (5, 20, 6),
    ]
    assert points[-1] == HeldOutPoint(3.0, 3.1, 3.2, 5, 20, 6)


def test_a_stage_that_runs_share_costs_once(stages):
    made = stages(sft=[SFT_ROWS[0] | {"perf/step_s": 5.0}], rl=RL_ROWS[:1], rl_2=RL_ROWS[1:])
    runs = [run(100, easy=4, trained={"sft": made["sft"], "rl": made[name]}) for name in ("rl", "rl_2")]
    assert costs_together(runs) == Costs(1 + 2 * 2, 14.0, 154.0, 220.0, 10.0, 1.75)


def test_means_over_seeds_have_a_band_and_need_every_seed():
    start, middle, last = FAST.held_out_mean("easy", 0.95)
    assert (start.accuracy, start.low, start.high, start.steps) == (0.1, 0.1, 0.1, 0.0)
    # Student's t with one degree of freedom: 12.706 standard errors of 0.05.
    assert middle.accuracy == pytest.approx(0.3)
    assert (last.accuracy, last.low, last.high) == (pytest.approx(0.55), 0.0, 1.0)
    alone = replace(FAST, seeds=FAST.seeds[1:]).held_out_mean("easy", 0.95)
    assert (alone[1].low, alone[1].high) == (pytest.approx(0.15), pytest.approx(0.25))
    assert FAST.costs == COSTS
    unknown = replace(FAST.seeds[0], costs=replace(COSTS, seconds=None))
    assert replace(FAST, seeds=(unknown, FAST.seeds[1])).costs == replace(COSTS, seconds=None)


# A comparison.


def test_accuracies_are_means_over_seeds_and_differences_are_paired():
    findings = compared(LUFFY, OTHER)
    luffy, other = data_of(findings)["arms"]
    assert (luffy["accuracy"][0]["value"], luffy["minus_reference"]) == (pytest.approx(0.55), [])
    assert luffy["accuracy"][0]["by_seed"] == {"1": 0.5, "2": 0.6}
    easy, hard = other["minus_reference"]
    assert (easy["value"], easy["by_seed"]) == (pytest.approx(0.4), pytest.approx({"1": 0.4, "2": 0.4}))
    assert (easy["significant"], hard["significant"]) == (True, False)
    assert luffy["curve"][-1] == {"reward": 0.75, "steps": 4, "samples": 16.0, "seconds": 5.0}
    assert other["cost_a_seed"]["peak_memory_gib"] is None
    page = page_of(findings)
    opening = page.partition("<main>")[2].partition('id="results"')[0]
    assert "other is ahead of luffy (+40.0 [" in opening and "2 arms with 2 seeds" in opening
    assert page == page_of(compared(LUFFY, OTHER)) and page.count("<figure>") == 4
    assert "held-out" not in page


def test_p_values_are_corrected_over_all_tests_that_a_comparison_has():
    findings = compared(LUFFY, OTHER, arm("third", (22, 11), (22, 9)), arm("broken", failures={1: "no", 2: "no"}))
    plain = {place: effect.result.p_value for place, effect in findings.effects.items()}
    assert len(plain) == 4
    smallest = min(plain, key=plain.get)
    assert findings.effects[smallest].adjusted_p == pytest.approx(min(1.0, 4 * plain[smallest]))
    assert max(effect.adjusted_p for effect in findings.effects.values()) >= max(plain.values())


def test_failed_seeds_and_arms_are_shown_and_the_rest_is_compared():
    half = arm("half", (36, 10), failures={2: "was ended by SIGKILL"})
    findings = compared(LUFFY, OTHER, half, arm("broken", failures={1: HOSTILE, 2: "no"}))
    effect = findings.effect(ONLY_CELL, "half", EASY)
    assert (effect.seeds, effect.result.num_seeds) == ((1,), 1)
    assert findings.failures[0] == "half, seed 2: was ended by SIGKILL"
    rows = pages.accuracy_table(findings, "greedy").texts
    assert "1 of 2 seeds, the others failed" in rows[3][0]
    assert rows[-1][1:] == ["failed", "failed"]
    assert {name for _, name, _, _ in findings.effects} == {"other", "half"}
    page = page_of(findings)
    assert "Failed runs" in page and "&lt;script&gt;" in page
    assert pages.cost_table(findings).texts[-1][1:] == ["–"] * 5
    without = compared(arm("luffy", failures={1: "no", 2: "no"}), OTHER)
    assert (without.effects, pages.difference_table(without, "greedy")) == ({}, None)
    assert "minus luffy" not in page_of(without)


def test_few_seeds_are_warned_of_and_other_problems_are_not_compared():
    alone = compared(arm("luffy", (20, 10)), seeds=(1,)), gridded({"sft.num_traces": (64, 128)}, (10, 20), seeds=(1,))
    assert all("say nothing about what another seed would give" in page_of(findings) for findings in alone)
    assert "fewer than three do not show how far seeds differ" in page_of(compared(LUFFY, OTHER))
    asked = replace(OTHER, seeds=(replace(OTHER.seeds[0], evaluation=evaluation(problems=41, easy=20, hard=10)),))
    with refused("other, easy, seed 1", "luffy", error=DataError):
        compared(LUFFY, asked)


def test_an_arm_that_spends_another_budget_is_told():
    spent = {"enough": COSTS, "off": replace(COSTS, optimizer_steps=15.0)}
    arms = [replace(arm(name), seeds=(run(1, own, easy=20, hard=10),)) for name, own in spent.items()]
    findings = compared(*arms, reference="enough", budget={"optimizer_steps": 12})
    says = "off: 15 optimizer steps a seed where the budget is 12"
    assert findings.off_budget == [says] == data_of(findings)["off_budget"]
    assert says in page_of(findings)


def test_the_page_says_how_many_steps_an_accuracy_took():
    findings = compared(FAST, measured("slow", (0.1, 0.1, 0.3), (0.2, 0.2, 0.2)), arm("unmeasured", (20, 10)))
    (table,) = pages.steps_to_reach(findings)
    assert table.header == ("arm", "20 %", "30 %", "40 %", "50 %", "60 %")
    assert table.texts == [["luffy", "4", "6", "6", "8", "1 of 2 seeds"], ["slow", "4", "1 of 2 seeds", "–", "–", "–"]]
    assert page_of(findings).count('alt="easy over ') == 3
    assert data_of(findings)["arms"][0]["held_out"]["easy"][2]["steps"] == 8.0


# Tuning.


@pytest.fixture(scope="module")
def tuned():
    """`tuned(luffy=(10, 30, None))`: what the tries of `compare_tuned` found; None, and arms left out, have failed."""
    sweep = load_sweep("compare_tuned", ["seeds=[11, 12]"])

    def found(**solved):
        outcomes = {}
        for each in sweep.tuning_runs():
            right = solved.get(each.arm, (None,) * 3)[each.point.number - 1]
            finished = right is not None
            outcomes[each.folder] = run(each.seed, validation=right) if finished else LuffyError("was ended\nits log")
        return sweep, tuning_of(sweep, ONLY_CELL, outcomes)

    return found


def of(tuning, arm):
    return next(each for each in tuning.arms if each.arm == arm)


@pytest.mark.parametrize(
    ("solved", "number", "warning"),
    [
        ((10, 30, 20), 2, ""),
        ((10, 30, 30), 2, ""),  # of equal ones the first
        ((0, 0, 0), 1, "equally accurate"),
        ((30, 20, 10), 1, "smallest value tried"),
        ((10, 20, 30), 3, "largest value tried"),
        ((10, 20, None), 2, ""),
        ((None, None, None), None, ""),
    ],
)
def test_the_highest_accuracy_is_chosen_and_what_is_not_to_be_trusted_is_told(tuned, solved, number, warning):
    _, tuning = tuned(luffy=solved)
    assert choose(tuning, strict=False).get("luffy") == number
    assert choose(tuning, strict=True).get("luffy") == (None if None in solved else number)
    (line,) = of(tuning, "luffy").warnings or [""]
    assert warning in line and bool(line) == bool(warning)


def test_only_numbers_have_edges(tuned):
    tried = of(tuned(luffy=(30, 20, 10))[1], "luffy")
    for values in (("cosine", "constant", "linear"), (True, False, True)):
        tries = [
            replace(each, results=replace(each.results, point=replace(each.point, values=(("key", value),))))
            for each, value in zip(tried.tries, values, strict=True)
        ]
        assert replace(tried, tries=tuple(tries)).warnings == []


def test_an_arm_runs_with_the_values_that_its_own_tries_chose(tuned):
    sweep, tuning = tuned(luffy=(10, 30, 20), sft=(10, 20, 30))
    runs = sweep.reported_runs(chosen={ONLY_CELL: choose(tuning, strict=False)})
    assert [(each.title, each.config.evaluation.only) for each in runs[:2]] == [("sft 11", None), ("luffy 11", None)]
    assert (runs[0].config.sft.optimizer.lr, runs[1].config.rl.optimizer.lr) == (8e-4, 1e-4)
    outcomes = {each.folder: run(each.seed, easy=4) for each in runs} | {"luffy-12": LuffyError("was ended\nits log")}
    arms = {each.name: each for each in arms_of(sweep, runs, outcomes)}
    assert list(arms) == list(sweep.design.arms)
    assert ([seed.seed for seed in arms["luffy"].seeds], arms["luffy"].failures) == ([11], {12: "was ended"})
    nothing_chosen = arms["sft_then_rl"].failures
    assert set(nothing_chosen) == {11, 12} and "no point of its grid has finished" in nothing_chosen[11]


def test_page_and_data_tell_what_was_tried_chosen_and_failed(tuned):
    _, tuning = tuned(sft=(30, 20, 10), luffy=(10, 30, None))
    tuning = replace(tuning, arms=(of(tuning, "sft"), of(tuning, "luffy")))
    reported = [ArmResults(name, LUFFY.point, (run(1, easy=20),), {}) for name in ("sft", "luffy")]
    found = compared(*reported, seeds=(1,), tuning=tuning, base={"easy": 4})
    rows = pages.tries_table(found.tuning).texts
    assert [row[3] for row in rows] == ["chosen", "", "", "", "chosen", ""]
    assert rows[5][2] == "failed" and len(pages.tuning_costs(found.tuning).texts) == 2
    assert found.failures == ["luffy, rl.optimizer.lr=0.0002, seed 100: was ended"]
    page = page_of(found)
    assert not [words for words in ("3 tries", "seed 100", "validation", "rl.optimizer.lr") if words not in page]
    data = data_of(found)["tuning"]
    assert [each["chosen"] for each in data["arms"]] == [{"sft.optimizer.lr": 2e-4}, {"rl.optimizer.lr": 1e-4}]
    assert data["arms"][0]["tries"][0]["accuracy"]["value"] == pytest.approx(30 / 40)
    failed = data["arms"][1]["tries"][2]
    assert (failed["accuracy"], failed["failures"]) == (None, {"100": "was ended"})
    assert data["warnings"] == of(tuning, "sft").warnings
    untuned = replace(found, tuning=None)
    assert data_of(untuned)["tuning"] is None and "#tuning" not in page_of(untuned)


# A grid.

SIZES = {"sft.num_traces": (64, 128, 256)}
RATES = {"sft.optimizer.lr": (1e-4, 1e-3)}
SIX = (10, 20, 30, 12, 22, 32)


@pytest.mark.parametrize(
    ("grid", "solved", "failed", "marks"),
    [
        (SIZES, SIX[:3], (), 3),
        (SIZES, SIX[:3], (2,), 2),
        (SIZES, SIX[:3], (1, 2, 3), 0),
        (SIZES | RATES, SIX, (), 6),
        (SIZES | RATES, SIX, (2,), 5),
        (SIZES | RATES | {"sft.batch_size": (4,)}, SIX, (), 0),
    ],
)
def test_one_key_or_two_are_lines_three_a_table_and_a_failed_point_leaves_a_gap(grid, solved, failed, marks):
    """A mark for each point, for each of the two suites."""
    findings = gridded(grid, solved, failed)
    page = page_of(findings)
    assert sum(svg.count("<use") for figures in stands_alone(page).figures.values() for svg in figures) == 2 * marks
    assert page.count("<figure>") == (2 if marks else 0)
    assert ("Failed runs" in page) == bool(failed) == bool(findings.failures)
    if len(failed) < len(solved):
        rows = enumerate(pages.cost_table(findings).texts, start=1)
        assert [number for number, row in rows if {*row[1:]} == {"–"}] == [*failed]


def test_points_of_a_grid_are_means_over_seeds_in_tables_lines_and_data():
    findings = gridded(SIZES, SIX[:3])
    rows = pages.accuracy_table(findings, "greedy").texts
    assert [row[1].partition(" ")[0] for row in rows] == ["27.5", "52.5", "77.5"]
    assert rows[0][1].endswith("(25.0, 30.0)")
    first, *_ = data_of(findings)["points"]
    assert first["values"] == {"sft.num_traces": 64}
    assert first["accuracy"][0]["by_seed"] == {"1": 0.25, "2": 0.3}
    assert first["cost_a_seed"]["seconds"] == 61.0
    findings = gridded(SIZES | RATES, SIX, failed=(2,))
    assert findings.failures[0] == "sft.num_traces=64, sft.optimizer.lr=0.001, seed 1: was ended"


# A study.

PRIMARY = ("in_distribution", "greedy")
SHARES = {"": 0.2, "sft": 0.3, "luffy": 0.8}


def outcome(cell, arm, seed):
    rng = np.random.default_rng([seed, len(cell), len(arm)])
    share = 0.3 if (cell, arm) == ("heat-cool", "luffy") else SHARES[arm]
    run = {"cell": cell, "role": REPORTED if arm else BASE, "arm": arm, "point": 1, "seed": seed}
    correct = tuple((rng.random(80) < share).astype(int).tolist())
    return {**run, **dict(zip(("suite", "decoding"), PRIMARY, strict=True))}, correct


@pytest.fixture(scope="module")
def study():
    return load_sweep("study_smoke")


@pytest.fixture(scope="module")
def results(study):
    rows = [outcome(cell, "", 0) for cell in study.cells]
    rows += [
        outcome(cell, arm, seed) for cell in study.cells for arm in study.design.arms for seed in study.seeds(cell)
    ]
    measures = [{**row, "values": "", "measure": "accuracy", "value": float(np.mean(correct))} for row, correct in rows]
    outcomes = [{**row, "problems": "same", "num_samples": 1, "correct": correct} for row, correct in rows]
    order = ["cell", "role", "arm", "point", "values", "seed", "suite", "decoding", "measure", "value"]
    return in_order(SweepResults(pd.DataFrame(measures)[order], pd.DataFrame(outcomes)))


def same(results, other):
    return results.measures.equals(other.measures) and results.outcomes.equals(other.outcomes)


def test_holm_is_over_the_planned_tests_of_a_study_alone_and_one_without_results_counts(study, results):
    findings = find(study, results)
    planned = {(cell, arm): findings.effect(cell, arm) for cell, arm, _ in study.design.planned}
    raw = sorted(effect.result.p_value for effect in planned.values())
    expected = np.maximum.accumulate([p * (len(raw) - i) for i, p in enumerate(raw)])
    assert sorted(effect.adjusted_p for effect in planned.values()) == pytest.approx(np.minimum(expected, 1.0))
    others = [effect for (cell, arm, *_), effect in findings.effects.items() if (cell, arm) not in planned]
    assert others and all(effect.adjusted_p is None for effect in others)
    assert findings.effect("centre", "luffy").verdict == "ahead"
    assert findings.effect("heat-cool", "luffy").verdict == "not distinguishable"
    cut = results.where(cell={*study.cells} - {"budget-long"})
    findings = find(study, cut)
    assert findings.missing == [("budget-long", "luffy", "sft")]
    effect = findings.effect("centre", "luffy")
    assert effect.adjusted_p == pytest.approx(2 * effect.result.p_value)
    assert pages.study_page(findings, cut).subtitle.startswith(f"{len(study.cells) - 1} of {len(study.cells)} cells")
    with_one_seed = results.outcomes.query("not (cell == 'centre' and arm == 'luffy' and seed == 2)")
    findings = find(study, SweepResults(results.measures, with_one_seed))
    assert findings.missing == [("centre", "luffy", "sft")]
    assert findings.effect("centre", "luffy").adjusted_p is None
    assert "1 of its seeds yet" in html(pages.study_page(findings, results))


def test_an_arm_is_also_tested_against_another_than_the_reference(study, results):
    design = study.design.model_copy(
        update={"tests": (*study.design.tests, PlannedConfig(cells=("centre",), arms=("sft",), against="luffy"))}
    )
    findings = find(replace(study, design=design), results)
    back, forth = findings.effect("centre", "sft", against="luffy"), findings.effect("centre", "luffy")
    assert back.is_planned and back.result.difference.value == -forth.result.difference.value
    assert findings.effect("heat-cool", "sft", against="luffy").adjusted_p is None
    planned = next(each for each in pages.study_page(findings, results).sections if each.title == "Planned tests")
    assert ["two steps", "sft", "luffy"] in [[cell.text for cell in row[:3]] for row in planned.tables[0].rows]


def test_each_seed_can_have_a_base_of_its_own(study, results):
    """Then the base has an interval over bases, too, and the page says what its intervals are over."""
    own = results.outcomes.query("arm != ''"), [outcome("centre", "", seed) for seed in (1, 2)]
    bases = pd.DataFrame([{**row, "problems": "same", "num_samples": 1, "correct": right} for row, right in own[1]])
    found = SweepResults(results.measures, pd.concat([own[0], bases], ignore_index=True))
    findings = replace(find(study, found), repeated_over="bases")
    assert [*findings.score("", PRIMARY, "centre").by_seed] == [1, 2]
    page = pages.study_page(findings, found)
    assert [each.title for each in page.sections[0].figures] == [each.label for each in study.design.cells.values()]
    assert "over bases and problems" in html(page) and "bases 1, 2; 1 in four steps" in page.subtitle


def test_a_table_of_the_page_is_what_the_parquet_says(study, results, tmp_path):
    files = result_files(tmp_path / "design.yaml", "small")
    with refused("no such file", error=DataError):
        read_sweep_results(files)
    write_results(results, files)
    read = read_sweep_results(files)
    assert same(read, results)
    table = pages.accuracies_of_cells(find(study, read), PRIMARY)
    assert table.header == ("situation", "base", "sft", "luffy")
    for cell, row in zip(study.cells, table.rows, strict=True):
        for name, shown in zip(table.header[1:], row[1:], strict=True):
            own = results.where(cell=[cell], arm=[name.replace("base", "")]).outcomes
            assert shown.text == f"{100 * np.mean([*own['correct']]):.1f}"
    write_results(results, files[::-1])
    with refused("holds no results of a study", error=DataError):
        read_sweep_results(files)
    for file in files:
        file.write_text("nothing")
    with refused("is not a parquet file", error=DataError):
        read_sweep_results(files)


def test_results_that_differ_in_one_answer_are_found_and_not_joined(study, results):
    first, outcomes = results.outcomes.iloc[0], results.outcomes.copy()
    outcomes.at[0, "correct"] = (1 - first["correct"][0], *first["correct"][1:])
    differing = replace(results, outcomes=outcomes)
    assert first_difference(results, replace(results, outcomes=results.outcomes[1:])) is None
    with refused(f"{first['cell']}, ", "committed", error=DataError):
        joined_results(results, differing)
    with refused("centre, ", "point 1", "point 2", error=DataError):
        again = replace(results, outcomes=results.outcomes.replace({"point": {1: 2}}))
        joined_results(results.where(seed=[0, 1]), again.where(seed=[2]))


def test_machines_add_their_runs_to_the_same_files(results):
    one, other = results.where(seed=[0, 1]), results.where(seed=[0, 2])
    assert same(joined_results(one, other), results) and same(joined_results(other, one), results)
    assert same(joined_results(results, one), results)  # fewer runs replace nothing
    timed = in_order(replace(one, measures=one.measures.assign(measure="seconds")))
    slower = replace(timed, measures=timed.measures.assign(value=timed.measures["value"] + 1))
    assert same(joined_results(timed, slower), timed)  # a time is no difference

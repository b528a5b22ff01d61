"""What a comparison finds on arms whose verdicts are chosen, and how its page and data say it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from synthetic.finished_chain import HOSTILE, write_chain
from synthetic.suite_scores import evaluation

from luffy.config.many_runs.comparison_config import BudgetConfig
from luffy.errors import LuffyError
from luffy.evaluation.method_comparison.arms import (
    Arm,
    Costs,
    FinishedSeed,
    _costs_of_training,
    _curve,
    read_seed,
    total_costs,
)
from luffy.evaluation.method_comparison.findings import as_json, find
from luffy.report.cells import plain_table
from luffy.report.page import html
from luffy.report.sweep_pages import accuracy_table, comparison_page, cost_table, difference_table, steps_to_reach
from luffy.tracking.metrics import HeldOutPoint, StepLines, metric_line

BUDGET = BudgetConfig(optimizer_steps=12)
COSTS = Costs(12.0, 96.0, 1000.0, 1500.0, 61.0, None)
RL_ROWS = [
    {"step": 1, "reward/mean": 0.25, "batch/optimizer_steps": 2.0, "batch/num_rows": 8.0,
     "batch/response_tokens": 80.0, "rollout/num_drawn": 7.0,
     "rollout/tokens_drawn": 70.0, "perf/step_s": 2.0, "perf/peak_memory_gib": 1.5},
    {"step": 2, "reward/mean": 0.75, "batch/optimizer_steps": 2.0, "batch/num_rows": 8.0,
     "batch/response_tokens": 96.0, "rollout/num_drawn": 7.0,
     "rollout/tokens_drawn": 84.0, "perf/step_s": 3.0, "perf/peak_memory_gib": 1.75},
]  # fmt: skip
WITH_SFT_STEP = [RL_ROWS[0], RL_ROWS[1] | {"batch/optimizer_steps": 3.0}]
SFT_ROWS = [{"step": 1, "batch/num_rows": 4.0, "batch/response_tokens": 44.0, "perf/step_s": 1.0}]


def arm(name, *counts, failures=(), curve=()):
    seeds = tuple(
        FinishedSeed(seed, evaluation(easy=easy, hard=hard), COSTS, tuple(curve))
        for seed, (easy, hard) in enumerate(counts, start=1)
    )
    return Arm(name, "rl", name, seeds, dict(failures))


def compared(*arms, reference="luffy"):
    return find("small", BUDGET, reference, (1, 2), evaluation(easy=4, hard=0), arms)


LUFFY = arm("luffy", (20, 10), (24, 10), curve=tuple(_curve([], RL_ROWS, 0.0)))
OTHER = arm("other", (36, 10), (40, 12))


def test_accuracies_are_means_over_seeds_and_differences_are_paired():
    findings = compared(LUFFY, OTHER)
    score = findings.scores["luffy", ("easy", "greedy")]
    assert score.estimate.value == pytest.approx(0.55)
    assert score.by_seed == {1: 0.5, 2: 0.6}
    test = findings.tests["other", ("easy", "greedy")]
    assert test.result.difference.value == pytest.approx(0.4)
    assert test.result.by_seed == pytest.approx((0.4, 0.4))
    assert test.is_significant
    assert not findings.tests["other", ("hard", "greedy")].is_significant


def test_p_values_are_corrected_over_all_tests_of_the_comparison():
    findings = compared(LUFFY, OTHER, arm("third", (22, 11), (22, 9)))
    plain = {key: test.result.p_value for key, test in findings.tests.items()}
    assert len(plain) == 4
    smallest = min(plain, key=plain.get)
    assert findings.tests[smallest].adjusted_p == pytest.approx(min(1.0, 4 * plain[smallest]))
    assert max(test.adjusted_p for test in findings.tests.values()) >= max(plain.values())


def test_a_failed_seed_leaves_the_seeds_that_both_have():
    findings = compared(LUFFY, arm("other", (36, 10), failures={2: "was ended by SIGKILL"}.items()))
    test = findings.tests["other", ("easy", "greedy")]
    assert (test.seeds, test.result.num_seeds) == ((1,), 1)
    assert findings.failures == ["other, seed 2: was ended by SIGKILL"]
    _, rows = plain_table(accuracy_table(findings, "greedy"))
    assert "1 of 2 seeds, the others failed" in rows[2][0]


def test_an_arm_without_a_seed_is_shown_as_failed_and_the_rest_is_compared():
    broken = arm("broken", failures={1: HOSTILE, 2: "no"}.items())
    findings = compared(LUFFY, OTHER, broken)
    _, rows = plain_table(accuracy_table(findings, "greedy"))
    assert rows[-1][1:] == ["failed", "failed"]
    assert {name for name, _ in findings.tests} == {"other"}
    page = html(comparison_page(findings))
    assert "Failed runs" in page
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert plain_table(cost_table(findings))[1][-1][1:] == ["–"] * 5


def test_a_failed_reference_leaves_accuracies_without_tests():
    findings = compared(arm("luffy", failures={1: "no", 2: "no"}.items()), OTHER)
    assert findings.tests == {}
    assert difference_table(findings, "greedy") is None
    assert html(comparison_page(findings)).count("minus luffy") == 0


def test_the_page_stands_alone_and_is_the_same_twice():
    page = html(comparison_page(compared(LUFFY, OTHER)))
    assert page == html(comparison_page(compared(LUFFY, OTHER)))
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    for words in ("Over optimizer steps", "Over samples", "Over time", "rows learned from", "Student", "Holm"):
        assert words in page
    assert page.count("<figure>") == 4


def test_with_one_seed_the_page_says_that_nothing_is_known_of_another():
    findings = find("small", BUDGET, "luffy", (1,), evaluation(easy=4, hard=0), [arm("luffy", (20, 10))])
    page = html(comparison_page(findings))
    assert "say nothing about what another seed would give" in page


def test_the_data_hold_what_the_page_says():
    data = json.loads(as_json(compared(LUFFY, OTHER)))
    luffy, other = data["arms"]
    assert luffy["accuracy"][0]["value"] == pytest.approx(0.55)
    assert luffy["accuracy"][0]["by_seed"] == {"1": 0.5, "2": 0.6}
    assert luffy["minus_reference"] == []
    assert other["minus_reference"][0]["significant"] is True
    assert luffy["curve"][-1] == {"reward": 0.75, "steps": 4, "samples": 16.0, "seconds": 5.0}
    assert other["cost_a_seed"]["peak_memory_gib"] is None


def test_arms_that_were_asked_other_problems_are_not_compared():
    seed = FinishedSeed(1, evaluation(problems=41, easy=20, hard=10), COSTS, ())
    with pytest.raises(LuffyError, match="different problems"):
        compared(LUFFY, Arm("other", "rl", "other", (seed,), {}))


def test_costs_and_curves_count_the_cold_start():
    costs = total_costs([_costs_of_training("sft", SFT_ROWS), _costs_of_training("rl", RL_ROWS)])
    assert costs == Costs(1 + 2 * 2, 14.0, 154.0, 44.0 + 176.0, 6.0, 1.75)
    first, last = _curve([SFT_ROWS], RL_ROWS, 1.0)
    assert (first.steps, first.samples, first.seconds) == (1 + 2, 12.0, 3.0)
    assert (last.steps, last.samples, last.seconds) == (1 + 4, 20.0, 6.0)


def test_a_cost_that_a_step_does_not_know_is_not_guessed():
    assert _costs_of_training("rl", [RL_ROWS[0], {"step": 2, "reward/mean": 1.0}]).generated_tokens is None


def test_an_interleaved_sft_step_counts_against_the_budget_and_the_page_tells():
    costs, curve = _costs_of_training("rl", WITH_SFT_STEP), tuple(_curve([], WITH_SFT_STEP, 0.0))
    assert (costs.optimizer_steps, [point.steps for point in curve]) == (5.0, [2, 5])
    seed = FinishedSeed(1, evaluation(easy=20, hard=10), replace(COSTS, optimizer_steps=15.0), curve)
    findings = compared(LUFFY, Arm("relift", "rl", "relift", (seed,), {}))
    assert findings.off_budget == ["relift: 15 optimizer steps a seed where the budget is 12"]
    assert findings.off_budget[0] in html(comparison_page(findings))
    assert json.loads(as_json(findings))["off_budget"] == findings.off_budget


def test_an_arm_that_spends_other_tokens_than_the_budget_is_told():
    budget = BudgetConfig(tokens=20_000, max_optimizer_steps=48)
    costs = {"enough": (9_500.0, 10_400.0), "few": (4_000.0, 5_000.0)}
    seeds = {
        name: FinishedSeed(
            1,
            evaluation(easy=20, hard=10),
            replace(COSTS, generated_tokens=generated, trained_tokens=trained),
            (),
        )
        for name, (generated, trained) in costs.items()
    }
    arms = [Arm(name, "rl", "relift", (seed,), {}) for name, seed in seeds.items()]
    findings = replace(compared(LUFFY, *arms), budget=budget, arms=tuple(arms))
    assert findings.off_budget == ["few: 9,000 tokens a seed where the budget is 20,000"]


def test_a_budget_of_rollouts_says_nothing_of_optimizer_steps():
    assert replace(compared(LUFFY, OTHER), budget=BudgetConfig(rollouts=96)).off_budget == []


def held_out(*accuracies):
    return {
        "easy": tuple(
            HeldOutPoint(value, value - 0.05, value + 0.05, 4.0 * place, 32.0 * place, 9.0 * place)
            for place, value in enumerate(accuracies)
        )
    }


def measured_arm(name, *curves):
    plain = arm(name, *[(20, 10)] * len(curves))
    seeds = tuple(replace(seed, held_out=curve) for seed, curve in zip(plain.seeds, curves, strict=True))
    return replace(plain, seeds=seeds)


def test_held_out_accuracy_is_a_mean_over_seeds_with_a_band_over_them():
    fast = measured_arm("luffy", held_out(0.1, 0.4, 0.6), held_out(0.1, 0.2, 0.5))
    first, middle, last = fast.held_out_mean("easy", 0.95)
    assert (first.accuracy, first.low, first.high, first.steps) == (0.1, 0.1, 0.1, 0.0)
    # Student's t with one degree of freedom: 12.706 standard errors of 0.05.
    assert middle.accuracy == pytest.approx(0.3)
    assert last.accuracy == pytest.approx(0.55)
    assert (last.low, last.high) == (0.0, 1.0)
    alone = measured_arm("other", held_out(0.1, 0.2)).held_out_mean("easy", 0.95)
    assert (alone[1].low, alone[1].high) == (pytest.approx(0.15), pytest.approx(0.25))


def test_a_seed_is_read_with_its_measurements_which_are_no_steps_of_training(tmp_path):
    _, stages = write_chain(tmp_path, num_problems=4, num_steps=4)
    measured = {"val/accuracy": 0.5, "val/a/accuracy": 0.5, "val/a/accuracy_low": 0.4, "val/a/accuracy_high": 0.6}
    (tmp_path / "measured").mkdir()
    writer = StepLines(tmp_path / "measured/metrics.jsonl")
    for row in ({"step": 0, **measured}, RL_ROWS[0], {**RL_ROWS[1], **measured}):
        writer.append(metric_line(row["step"], {name: value for name, value in row.items() if name != "step"}))
    writer.close()
    run = SimpleNamespace(seed=3, last="rl")
    seed = read_seed(run, {"rl": tmp_path / "measured", "evaluate_rl": stages["evaluate_rl"]})
    assert seed.costs == _costs_of_training("rl", RL_ROWS)
    assert seed.curve == tuple(_curve([], RL_ROWS, 0.0))
    assert [(point.steps, point.samples, point.seconds) for point in seed.held_out["a"]] == [(0, 0, 0), (4, 16, 5)]


def test_the_page_says_how_many_steps_an_accuracy_took():
    fast = measured_arm("luffy", held_out(0.1, 0.4, 0.6), held_out(0.1, 0.2, 0.5))
    slow = measured_arm("other", held_out(0.1, 0.1, 0.3), held_out(0.2, 0.2, 0.2))
    findings = compared(fast, slow, arm("unmeasured", (20, 10)))
    (table,) = steps_to_reach(findings)
    header, rows = plain_table(table)
    assert header == ["arm", "20 %", "30 %", "40 %", "50 %", "60 %"]
    assert rows == [
        ["luffy", "4", "6", "6", "8", "1 of 2 seeds"],
        ["other", "4", "1 of 2 seeds", "–", "–", "–"],
    ]
    page = html(comparison_page(findings))
    assert page.count("held-out-easy-") == 3
    assert "Optimizer steps to reach an accuracy on easy" in page
    assert json.loads(as_json(findings))["arms"][0]["held_out"]["easy"][2]["steps"] == 8.0
    assert "held-out" not in html(comparison_page(compared(LUFFY, OTHER)))

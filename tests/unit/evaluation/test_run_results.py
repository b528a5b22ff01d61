"""What a run has spent and learned, read from the files of its stages; means over seeds."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from synthetic.finished_chain import write_chain
from synthetic.sweeps import COSTS, arm, run

from luffy.evaluation.across_runs.run_results import Costs, costs_together, read_run
from luffy.tracking.metrics import HeldOutPoint, StepLines, metric_line

MEASURED = {"val/accuracy": 0.5, "val/a/accuracy": 0.5, "val/a/accuracy_low": 0.4, "val/a/accuracy_high": 0.6}
RL_ROWS = [
    {"reward/mean": 0.25, "batch/optimizer_steps": 2.0, "batch/num_rows": 8.0, "batch/response_tokens": 80.0,
     "rollout/num_drawn": 7.0, "rollout/tokens_drawn": 70.0, "perf/step_s": 2.0, "perf/peak_memory_gib": 1.5},
    {"reward/mean": 0.75, "batch/optimizer_steps": 2.0, "batch/num_rows": 8.0, "batch/response_tokens": 96.0,
     "rollout/num_drawn": 7.0, "rollout/tokens_drawn": 84.0, "perf/step_s": 3.0, "perf/peak_memory_gib": 1.75},
]  # fmt: skip
SFT_ROWS = [{"batch/num_rows": 4.0, "batch/response_tokens": 44.0, "perf/step_s": 1.0}]


@pytest.fixture
def stages(tmp_path):
    """Directories of stages that have logged these rows, and of an evaluation."""
    _, written = write_chain(tmp_path, num_problems=4, num_steps=4)

    def logged(**rows):
        # As in a workspace, the folder above a result is called by its kind.
        own = {name: tmp_path / name.partition("_")[0] / f"own_{name}" for name in rows}
        for name, of_stage in rows.items():
            own[name].mkdir(parents=True)
            writer = StepLines(own[name] / "metrics.jsonl")
            for step, row in enumerate(of_stage, start=1):
                numbers = {key: value for key, value in row.items() if key != "step"}
                writer.append(metric_line(row.get("step", step), numbers))
            writer.close()
        return {**own, "evaluate_rl": written["evaluate_rl"]}

    return logged


def read(stages):
    return read_run(SimpleNamespace(seed=3, last="rl"), stages)


def test_costs_and_curves_count_the_cold_start(stages):
    found = read(stages(sft=SFT_ROWS, rl=RL_ROWS))
    assert found.costs == Costs(1 + 2 * 2, 14.0, 154.0, 44.0 + 176.0, 6.0, 1.75)
    first, last = found.curve
    assert (first.steps, first.samples, first.seconds) == (1 + 2, 12.0, 3.0)
    assert (last.steps, last.samples, last.seconds) == (1 + 4, 20.0, 6.0)


def test_the_curve_of_a_second_rl_goes_on_where_the_first_ended(stages):
    one, two = read(stages(sft=SFT_ROWS, rl=RL_ROWS)), read(stages(sft_2=SFT_ROWS, rl_2=RL_ROWS[:1], rl_3=RL_ROWS[1:]))
    assert (two.costs, two.curve) == (one.costs, one.curve)


def test_a_cost_that_a_step_does_not_know_is_not_guessed(stages):
    assert read(stages(rl=[RL_ROWS[0], {"reward/mean": 1.0}])).costs.generated_tokens is None


def test_measurements_on_the_way_are_no_steps_of_training(stages):
    plain = read(stages(rl=RL_ROWS))
    measured = [{"step": 0, **MEASURED}, {"step": 1, **RL_ROWS[0]}, {"step": 2, **RL_ROWS[1], **MEASURED}]
    found = read(stages(rl_2=measured) | {})
    assert (found.costs, found.seed) == (plain.costs, 3)
    assert found.curve == plain.curve
    assert [(point.steps, point.samples, point.seconds) for point in found.held_out["a"]] == [(0, 0, 0), (4, 16, 5)]


def test_a_stage_that_runs_share_costs_once(stages):
    made = stages(sft=[SFT_ROWS[0] | {"perf/step_s": 5.0}], rl=RL_ROWS[:1], rl_2=RL_ROWS[1:])
    runs = [run(100, easy=4, trained={"sft": made["sft"], "rl": made[name]}) for name in ("rl", "rl_2")]
    assert costs_together(runs) == Costs(1 + 2 * 2, 14.0, 154.0, 220.0, 10.0, 1.75)


def held_out(*accuracies):
    """Measurements four optimizer steps apart, with an interval over problems of 0.05 on both sides."""
    return {
        "easy": tuple(
            HeldOutPoint(value, value - 0.05, value + 0.05, 4.0 * place, 32.0 * place, 9.0 * place)
            for place, value in enumerate(accuracies)
        )
    }


def test_means_over_seeds_have_a_band_and_need_every_seed():
    curves = held_out(0.1, 0.4, 0.6), held_out(0.1, 0.2, 0.5)
    plain = arm("luffy", (20, 10), (20, 10))
    fast = replace(plain, seeds=tuple(replace(seed, held_out=of) for seed, of in zip(plain.seeds, curves, strict=True)))
    first, middle, last = fast.held_out_mean("easy", 0.95)
    assert (first.accuracy, first.low, first.high, first.steps) == (0.1, 0.1, 0.1, 0.0)
    # Student's t with one degree of freedom: 12.706 standard errors of 0.05.
    assert middle.accuracy == pytest.approx(0.3)
    assert (last.accuracy, last.low, last.high) == (pytest.approx(0.55), 0.0, 1.0)
    alone = replace(fast, seeds=fast.seeds[1:]).held_out_mean("easy", 0.95)
    assert (alone[1].low, alone[1].high) == (pytest.approx(0.15), pytest.approx(0.25))
    assert plain.costs == COSTS
    unknown = replace(fast.seeds[0], costs=replace(COSTS, seconds=None))
    assert replace(fast, seeds=(unknown, fast.seeds[1])).costs == replace(COSTS, seconds=None)

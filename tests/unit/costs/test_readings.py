"""What is read from a measured stage: fixed costs and the cost of a step are told apart."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from luffy.costs.readings import MeasuredRun, read_evaluation, read_training
from luffy.costs.response_lengths import Pace

PACE = Pace("natural", "as they come")


def run_of(
    out: Path, rows: Sequence[Mapping[str, float]], wall_s: float, progress: Sequence[tuple[int, float]]
) -> MeasuredRun:
    lines = [json.dumps({"step": number + 1, **row}) + "\n" for number, row in enumerate(rows)]
    (out / "metrics.jsonl").write_text("".join(lines))
    return MeasuredRun(out, wall_s, progress)


def steps_of(*seconds: float) -> list[dict[str, float]]:
    return [{"perf/step_s": each, "perf/update_s": each - 0.25, "perf/tokens_per_s": 100.0} for each in seconds]


def test_what_the_steps_do_not_explain_is_fixed(tmp_path: Path) -> None:
    run = run_of(tmp_path, steps_of(5.0, 2.0, 2.0, 2.0), 30.0, [(3, 100.0), (4, 103.5)])
    times = read_training(run, "sft", skipped=1, ahead=0, source="bench", num_units=64).times
    assert times.unit_s == pytest.approx(2.0)
    assert times.save_s == pytest.approx(1.5)  # between the last two reports, beside the step
    # Four usual steps and the checkpoint go off; the excess of the first step stays.
    assert times.fixed_s == pytest.approx(30.0 - 8.0 - 1.5)
    assert times.seconds(units=64, saves=2) == pytest.approx(20.5 + 128.0 + 3.0)


def test_the_last_checkpoint_of_rl_is_a_fixed_cost(tmp_path: Path) -> None:
    run = run_of(tmp_path, steps_of(2.0, 2.0), 10.0, [(1, 100.0), (2, 103.0)])
    times = read_training(run, "rl", skipped=1, ahead=0, source="bench", pace=PACE).times
    assert (times.save_s, times.fixed_s) == (pytest.approx(1.0), pytest.approx(6.0))


def test_a_validation_is_neither_a_step_nor_a_fixed_cost_nor_a_checkpoint(tmp_path: Path) -> None:
    rows = [{"step": 0, "perf/validation_s": 4.0}, *steps_of(5.0, 2.0), {**steps_of(2.0)[0], "perf/validation_s": 6.0}]
    run = run_of(tmp_path, [{"step": number, **row} for number, row in enumerate(rows)], 40.0, [(2, 100.0), (3, 109.0)])
    times = read_training(run, "sft", skipped=1, ahead=0, source="bench", validation="digest").times
    assert (times.validation_s, times.validation) == (pytest.approx(5.0), "digest")
    assert times.unit_s == pytest.approx(2.0)
    assert times.save_s == pytest.approx(9.0 - 2.0 - 6.0)
    assert times.fixed_s == pytest.approx(40.0 - 3 * 2.0 - 1.0 - 10.0)


def test_steps_that_fill_or_drain_the_pipeline_are_left_out(tmp_path: Path) -> None:
    run = run_of(tmp_path, steps_of(9.0, 9.0, 3.0, 3.0, 1.0), 30.0, [])
    assert read_training(run, "rl", skipped=2, ahead=1, source="bench", pace=PACE).step_s == pytest.approx(3.0)


def test_the_parts_of_a_step_add_up(tmp_path: Path) -> None:
    row = {
        "perf/step_s": 10.0, "perf/generation_s": 6.0, "perf/grading_s": 1.0, "perf/weights_s": 0.5,
        "perf/update_s": 2.5, "perf/train_tokens_per_s": 700.0, "perf/model_tflops": 0.02,
    }  # fmt: skip
    run = run_of(tmp_path, [row, row], 40.0, [])
    (tmp_path / "device.json").write_text(
        json.dumps(
            {"name": "CPU", "peak_flops": 4e10, "peak_source": "a product", "measuring_s": 2.0, "graders_s": 1.5}
        )
    )
    calls = [{"seconds": 9.0, "responses": 8, "tokens": 100}, {"seconds": 5.0, "responses": 8, "tokens": 400}]
    (tmp_path / "generation.jsonl").write_text("".join(json.dumps(call) + "\n" for call in calls))
    reading = read_training(run, "rl", skipped=1, ahead=0, source="bench", pace=PACE)
    assert reading.parts == {"generation": 5.0, "grading": 1.0, "weights": 0.5, "update": 2.5, "other": 1.0}
    assert reading.generated_tokens_per_s == pytest.approx(80.0)  # the first call warmed up
    assert reading.trained_tokens_per_s == 700.0
    assert reading.mfu == pytest.approx(0.5)
    # The start of the graders was part of what was measured at the end, and is part of a run.
    assert reading.times.fixed_s == pytest.approx(40.0 - 20.0 - 2.0 + 1.5)
    assert reading.response_words == "as they come (50 tokens each in the measurement)"


def test_a_known_mfu_is_not_measured_again(tmp_path: Path) -> None:
    row = {"perf/step_s": 1.0, "perf/model_tflops": 400.0, "perf/mfu": 0.4}
    (tmp_path / "device.json").write_text(json.dumps({"name": "H", "peak_flops": 1e12, "peak_source": "table"}))
    reading = read_training(run_of(tmp_path, [row, row], 9.0, []), "sft", skipped=1, ahead=0, source="bench")
    assert reading.mfu == 0.4


def test_an_evaluation_takes_its_start_and_its_responses(tmp_path: Path) -> None:
    calls = [{"seconds": 4.0, "responses": 20, "tokens": 500}, {"seconds": 6.0, "responses": 30, "tokens": 600}]
    (tmp_path / "generation.jsonl").write_text("".join(json.dumps(call) + "\n" for call in calls))
    times = read_evaluation(MeasuredRun(tmp_path, 25.0, []), "evaluate_rl", 50, 400, source="bench", pace=PACE).times
    assert (times.fixed_s, times.unit_s, times.num_units) == (pytest.approx(15.0), pytest.approx(0.2), 400)
    assert times.seconds(units=400, saves=0) == pytest.approx(95.0)

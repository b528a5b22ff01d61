"""What a plan says about time: from a bench, from finished stages with the same workload, or nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic.finished_stages import begin, finish

from luffy.config import load_experiment
from luffy.costs import forecast as module
from luffy.costs import workloads
from luffy.costs.earlier_runs import earlier_length
from luffy.costs.forecast import StageForecast, forecast
from luffy.costs.held_out_times import measured_by, validation_of
from luffy.costs.stage_times import StageTimes, read_times, write_times
from luffy.costs.workloads import record_name, this_machine, workload_of
from luffy.pipeline.experiment import Experiment, open_experiment
from luffy.pipeline.machine.gpus import Gpu
from luffy.pipeline.workspace import Workspace

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"
HERE = {"cpu": "Testbed 9000", "cpu_cores": "64"}
Open = Callable[..., Experiment]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "hardware", lambda: HERE)
    monkeypatch.setattr(workloads, "gpu_names", tuple)
    monkeypatch.setattr(module, "detected_gpus", tuple)


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    def open_it(*overrides: str) -> Experiment:
        config = load_experiment(SMOKE, overrides)
        return open_experiment(config, Workspace(tmp_path), code=lambda rooms: {"module": "1"})

    return open_it


def forecasts(experiment: Experiment) -> dict[str, StageForecast]:
    return {each.node: each for each in forecast(experiment.config, experiment.plan(), experiment.workspace)}


def measure(experiment: Experiment, name: str, times: StageTimes) -> None:
    node = next(node for node in experiment.nodes if node.name == name)
    key = workload_of(experiment.config, experiment.nodes, node, this_machine()).key
    write_times(experiment.workspace, record_name(node), key, times)


def finished(experiment: Experiment, name: str, *step_s: float, hardware: dict[str, str] = HERE) -> None:
    rows = [{"step": i + 1, "perf/step_s": s, "rollout/response_length_mean": 20.0 + i} for i, s in enumerate(step_s)]
    finish(experiment, name, metrics="".join(json.dumps(row) + "\n" for row in rows) or "{}\n", hardware=hardware)


def test_nothing_measured_is_nothing_said(opened: Open) -> None:
    assert {each.seconds for each in forecasts(opened()).values()} == {None}


def test_a_bench_gives_the_time_of_all_steps_and_checkpoints(opened: Open) -> None:
    measure(opened(), "rl", StageTimes(10.0, 2.0, 0.5, None, "bench"))
    # Six steps with a checkpoint every two: those of steps 2 and 4, since that of the last step is in the fixed cost.
    assert forecasts(opened())["rl"] == StageForecast("rl", pytest.approx(10.0 + 12.0 + 1.0), 0, "bench")
    assert forecasts(opened("rl.steps=100"))["rl"].seconds == pytest.approx(10.0 + 200.0 + 49 * 0.5)


def test_settings_that_change_no_step_leave_a_bench_valid_and_others_do_not(opened: Open) -> None:
    measure(opened(), "rl", StageTimes(10.0, 2.0, 0.5, None, "bench"))
    assert forecasts(opened("rl.optimizer.lr=1e-5", "seed=7"))["rl"].seconds is not None
    for other in ("rl.prompts_per_step=8", "execution.micro_batch_tokens=64", "model.architecture.num_layers=3",
                  "data.max_trace_tokens=63"):  # fmt: skip
        assert forecasts(opened(other))["rl"].seconds is None, other


def test_a_stage_that_is_resumed_has_the_rest_of_its_steps_left(opened: Open) -> None:
    measure(opened(), "rl", StageTimes(10.0, 2.0, 0.0, None, "bench"))
    for name in ("prepare_data", "base", "sft"):
        finished(opened(), name)
    begin(opened().plan_node("rl"), steps=4)
    assert forecasts(opened())["rl"].seconds == pytest.approx(10.0 + 2 * 2.0)
    assert forecasts(opened())["sft"] == StageForecast("sft", 0.0, 0, "reused")


def test_the_number_of_steps_of_sft_is_that_of_the_bench(opened: Open) -> None:
    measure(opened(), "sft", StageTimes(5.0, 1.0, 0.0, None, "bench"))
    assert forecasts(opened())["sft"].seconds is None  # the data decide, and are not prepared
    measure(opened(), "sft", StageTimes(5.0, 1.0, 0.0, 7, "bench"))
    assert forecasts(opened())["sft"].seconds == pytest.approx(12.0)


def test_a_finished_stage_on_the_same_machine_stands_for_one_that_learns_at_another_rate(opened: Open) -> None:
    for name in ("prepare_data", "base", "sft"):
        finished(opened(), name)
    finished(opened(), "rl", 9.0, 3.0, 3.0)
    later = opened("rl.optimizer.lr=1e-5", "rl.steps=20")
    found = forecasts(later)["rl"]
    # The finished stage took a minute: 51 seconds beside three steps of three seconds.
    assert found.seconds == pytest.approx(51.0 + 20 * 3.0)
    assert found.source.startswith("rl ")


VALIDATED = ("data.validation_prompts=4", "rl.validation={every: 4, source: validation}")


def test_the_measurements_of_a_validation_are_in_the_time_where_one_like_them_was_timed(opened: Open) -> None:
    node = next(node for node in opened(*VALIDATED).nodes if node.name == "rl")
    times = StageTimes(10.0, 2.0, 0.0, None, "bench", 3.0, measured_by(validation_of(node.settings)))
    measure(opened(*VALIDATED), "rl", times)
    # Six steps, measured before the first one and after steps 4 and 6.
    assert forecasts(opened(*VALIDATED))["rl"] == StageForecast("rl", pytest.approx(10.0 + 12.0 + 9.0), 0, "bench")
    other = forecasts(opened(*VALIDATED, "rl.validation.max_problems=2"))["rl"]
    assert (other.seconds, other.source) == (pytest.approx(22.0), "bench (without validation)")


def test_a_finished_stage_says_how_long_its_validation_took(opened: Open) -> None:
    experiment = opened(*VALIDATED)
    for name in ("prepare_data", "base", "sft"):
        finished(experiment, name)
    rows = [{"step": 0, "perf/validation_s": 5.0}, *({"step": step, "perf/step_s": 3.0} for step in (1, 2, 3))]
    rows.append({"step": 4, "perf/step_s": 3.0, "perf/validation_s": 7.0})
    finish(experiment, "rl", metrics="".join(json.dumps(row) + "\n" for row in rows), hardware=HERE)
    found = forecasts(opened(*VALIDATED, "rl.optimizer.lr=1e-5", "rl.steps=8"))["rl"]
    # The finished stage took a minute: 36 seconds beside four steps and two measurements.
    assert found.seconds == pytest.approx(36.0 + 8 * 3.0 + 3 * 6.0)


def test_another_machine_or_another_model_says_nothing(opened: Open) -> None:
    for name in ("prepare_data", "base", "sft"):
        finished(opened(), name)
    finished(opened(), "rl", 9.0, 3.0, 3.0, hardware={**HERE, "cpu": "Abacus"})
    assert forecasts(opened("rl.optimizer.lr=1e-5"))["rl"].seconds is None
    finished(opened(), "rl", 9.0, 3.0, 3.0)
    assert forecasts(opened("model.architecture.num_layers=3"))["rl"].seconds is None


def test_an_evaluation_takes_as_long_as_the_last_one_of_its_policy(opened: Open) -> None:
    for name in ("prepare_data", "base", "sft", "rl", "evaluate_base", "evaluate_sft"):
        finished(opened(), name)
    found = forecasts(opened("rl.optimizer.lr=1e-5"))
    assert found["evaluate_base"].source == "reused"
    assert found["evaluate_rl"].seconds == pytest.approx(60.0)


def test_cluster_ray_does_not_hide_the_times_of_stages_that_do_not_run_on_it(opened: Open) -> None:
    for name in ("prepare_data", "base", "sft", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl"):
        finished(opened("cluster=ray"), name, 3.0)
    found = forecasts(opened("cluster=ray", "rl.optimizer.lr=1e-5"))
    assert found["evaluate_rl"].seconds == pytest.approx(57.0 + 3.0)
    assert found["rl"].seconds is None  # what is there was made without Ray


def test_gpu_hours_are_those_of_the_gpus_that_a_stage_takes(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "detected_gpus", lambda: (Gpu("0", "uuid", 80.0),))
    measure(opened(), "rl", StageTimes(3576.0, 4.0, 0.0, None, "bench"))
    found = forecasts(opened())
    assert (found["rl"].gpus, found["rl"].gpu_hours) == (1, pytest.approx(1.0))
    assert found["report"].gpus == 0


def test_the_mean_length_of_responses_comes_from_the_last_steps_of_an_earlier_stage(opened: Open) -> None:
    experiment = opened()
    for name in ("prepare_data", "base", "sft"):
        finished(experiment, name)
    finished(experiment, "rl", *([1.0] * 12))
    node = next(node for node in experiment.nodes if node.name == "rl")
    workload = workload_of(experiment.config, experiment.nodes, node, "elsewhere")
    mean, where = earlier_length(experiment.workspace, workload, "rl") or (0.0, "")
    assert mean == pytest.approx(26.5)  # of steps 3 to 12: 22 to 31
    assert where == f"rl/{experiment.identities['rl'].key}"
    longer = opened("rl.max_response_tokens=96")
    other = workload_of(longer.config, longer.nodes, next(n for n in longer.nodes if n.name == "rl"), "elsewhere")
    assert earlier_length(experiment.workspace, other, "rl") is None


def test_a_measurement_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_times(workspace, "rl", "0" * 16, StageTimes(1.0, 2.0, 3.0, None, "bench"))
    assert read_times(workspace, "rl", "0" * 16) == StageTimes(1.0, 2.0, 3.0, None, "bench")
    (tmp_path / "benches" / "rl-0000000000000000.json").write_text('{"fixed_s": 1}')
    assert read_times(workspace, "rl", "0" * 16) is None

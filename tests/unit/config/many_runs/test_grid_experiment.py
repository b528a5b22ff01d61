"""One experiment over a grid: from a file, or around an experiment."""

from pathlib import Path

import pytest

from luffy.config.many_runs.comparison import load_comparison
from luffy.config.many_runs.grid_experiment import is_grid, load_grid
from luffy.errors import ConfigError

SMOKE = Path(__file__).parents[4] / "exp_configs" / "smoke.yaml"
GRID = f"""\
name: sizes
experiment: {SMOKE}
overrides: [chain=sft, method=sft]
grid: {{sft.num_traces: [4, 8], sft.optimizer.lr: [1e-4, 1e-3]}}
seeds: [1, 2]
"""


@pytest.fixture
def load(tmp_path):
    def loaded(text, *overrides):
        file = tmp_path / "grid.yaml"
        file.write_text(text)
        return load_grid(file, overrides)

    return loaded


def complaint(load, *arguments, **options):
    with pytest.raises(ConfigError) as caught:
        load(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_point_runs_with_every_seed(load):
    runs = load(GRID).runs
    assert [run.title for run in runs[:2]] == [
        "sizes 1 (sft.num_traces=4, sft.optimizer.lr=0.0001)", "sizes 1 (sft.num_traces=4, sft.optimizer.lr=0.001)",
    ]  # fmt: skip
    assert [(run.seed, run.config.sft.num_traces, run.config.sft.seed) for run in runs[3:5]] == [(1, 8, 1), (2, 4, 2)]
    assert len({run.folder for run in runs}) == len({run.config.name for run in runs}) == 8
    assert runs[0].nodes == ("prepare_data", "base", "sft", "evaluate_sft")


def test_a_grid_around_an_experiment_is_that_of_the_file(load, tmp_path):
    over = ["sft.num_traces=[4, 8]", "sft.optimizer.lr=[1e-4, 1e-3]"]
    around = load_grid(SMOKE, ["chain=sft", "method=sft"], over, [1, 2])
    assert [run.config.sft for run in around.runs] == [run.config.sft for run in load(GRID).runs]
    assert around.config.name == "smoke.grid"
    assert [run.seed for run in load_grid(SMOKE, (), ["rl.steps=[2, 4]"]).runs] == [7, 7]  # that of smoke.yaml
    assert (is_grid(tmp_path / "grid.yaml"), is_grid(SMOKE)) == (True, False)


def test_numbers_of_rounds_are_points_with_as_many_stages(load):
    rounds = GRID.replace("sft.num_traces: [4, 8], sft.optimizer.lr: [1e-4, 1e-3]", "expert_iteration.rounds: [1, 2]")
    one, two = load(rounds.replace("chain=sft", "chain=expert_iteration").replace("[1, 2]\n", "[1]\n")).runs
    assert one.nodes == ("prepare_data", "base", "sample_1", "sft_1", "evaluate_sft_1")
    assert two.nodes == ("prepare_data", "base", "sample_1", "sft_1", "sample_2", "sft_2", "evaluate_sft_2")


def test_a_grid_may_change_what_is_evaluated_or_the_method(load):
    text = GRID.replace("sft.num_traces: [4, 8], sft.optimizer.lr: [1e-4, 1e-3]", "{}")
    temperatures = text.replace("{{}}", "{evaluation.decodings.sampled.temperature: [0.6, 1.0]}")
    assert [run.config.evaluation.decodings["sampled"].temperature for run in load(temperatures).runs[:2]] == [0.6, 1.0]
    methods = text.replace("{{}}", "{method: [luffy, dapo]}").replace("[chain=sft, method=sft]", "[chain=rl]")
    assert [run.config.method for run in load(methods).runs[:2]] == ["luffy", "dapo"]


@pytest.mark.parametrize(
    ("change", "to", "says"),
    [
        ("sft.num_traces: [4, 8]", "sft.num_trace: [4, 8]", "sft.num_trace: unknown key"),
        ("sft.num_traces: [4, 8]", "sft.num_traces: []", "grid.sft.num_traces"),
        ("sft.num_traces: [4, 8]", "sft.num_traces: [4, 4]", "4 is listed twice"),
        ("sft.num_traces: [4, 8]", "rl.steps: [4, 8]", "are the same run; a key changes nothing"),
        ("sft.num_traces: [4, 8]", "sft.seed: [4, 8]", "every point runs with all of seeds"),
        ("sft.num_traces: [4, 8]", "name: [a, b]", "name cannot be tried"),
        ("sft.num_traces: [4, 8]", "sft.num_traces: [4, many]", "sft.num_traces"),
        ("[1, 2]", "[1, 1]", "give each seed once"),
    ],
)
def test_a_mistake_is_one_line_that_says_where(load, change, to, says):
    said = complaint(load, GRID.replace(change, to))
    assert says in said and "grid.yaml" in said


def test_a_grid_is_no_comparison(load, tmp_path):
    load(GRID)
    found = complaint(load_comparison, tmp_path / "grid.yaml")
    assert f"is a grid of runs, not a comparison of methods; run it with: luffy grid {tmp_path}" in found


def test_seeds_without_anything_that_they_change_are_refused(load):
    base = GRID.replace("[chain=sft, method=sft]", '["stages=[prepare_data, base, evaluate]"]')
    base = base.replace("sft.num_traces: [4, 8], sft.optimizer.lr: [1e-4, 1e-3]", "base.steps: [4, 8]")
    assert "seeds: have no effect without the stage sft or rl" in complaint(load, base)
    runs = load(base.replace("[1, 2]", "[1]")).runs
    assert [run.nodes[-1] for run in runs] == ["evaluate_base", "evaluate_base"]


def test_options_of_the_command_line_are_those_of_an_experiment(load, tmp_path):
    load(GRID)
    file = tmp_path / "grid.yaml"
    assert "--over has no effect on" in complaint(load_grid, file, over=["rl.steps=[1]"])
    assert "--seed has no effect on" in complaint(load_grid, file, seeds=[1])
    assert "is no grid; say what to try: --over" in complaint(load_grid, SMOKE)
    assert "is a comparison of methods, not an experiment; run it with:" in complaint(load_grid, "compare_arithmetic")
    assert "--over: rl.steps must be a list" in complaint(load_grid, SMOKE, over=["rl.steps=4"])
    assert "--over: rl.steps is given twice" in complaint(load_grid, SMOKE, over=["rl.steps=[4]", "rl.steps=[5]"])

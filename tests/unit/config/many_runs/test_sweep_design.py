"""Grids, comparisons and studies as files: the runs they list, and mistakes, each in one line that says where."""

import re
from operator import attrgetter
from pathlib import Path

import pytest
from support.refusals import refused
from synthetic.settings import SMOKE

from luffy.config import load_experiment
from luffy.config.load import parse_overrides
from luffy.config.many_runs.arms import made_as
from luffy.config.many_runs.sweep_design import grid_points, value_text
from luffy.config.many_runs.sweep_runs import distinct, load_sweep
from luffy.config.settings import settings_in
from luffy.errors import ConfigError

STUDY = SMOKE.with_name("study_smoke.yaml").read_text().replace("smoke.yaml", str(SMOKE))
DESIGN = Path(__file__).parents[4] / "docs" / "study" / "design.yaml"
HEAD = f"""\
name: small
experiment: {SMOKE}
seeds: [1, 2]
reference: luffy
"""
ARMS = """\
arms:
  sft: {chain: sft, method: sft}
  luffy: {chain: rl, method: luffy}
  sft_then_rl: {chain: sft_then_rl, method: on_policy, sft_steps: 4}
"""
STEPS = "budget: {optimizer_steps: 12}\n"
ROUNDS = """\
arms:
  luffy: {chain: rl, method: luffy}
  rounds: {chain: expert_iteration, method: sft}
  then_rl: {chain: expert_iteration_then_rl, method: on_policy, sft_steps: 6}
"""
COMPARED = HEAD + STEPS + ARMS
HEAT = "evaluation.decodings.sampled.temperature"
TUNED = f"""\
{HEAD}overrides: [data.validation_prompts=4]
{STEPS}select: {{on: validation, seeds: [100, 101]}}
grid: {{rl.optimizer.lr: [1e-4, 1e-3]}}
{ARMS.replace("method: sft}", "method: sft, grid: {sft.optimizer.lr: [1e-4, 1e-3]}}", 1)}"""
GRID = f"""\
name: sizes
experiment: {SMOKE}
overrides: [chain=sft, method=sft]
grid: {{sft.num_traces: [4, 8], sft.optimizer.lr: [1e-4, 1e-3]}}
seeds: [1, 2]
"""


@pytest.fixture
def load(tmp_path):
    def loaded(text, *overrides, **options):
        file = tmp_path / "many.yaml"
        file.write_text(text)
        return load_sweep(file, overrides, **options)

    return loaded


def changed(text, old, new):
    assert old in text
    return text.replace(old, new)


def checked(sweep):
    sweep.check(sweep.cells)


# What a grid is.


def test_every_combination_is_a_point_and_the_last_key_changes_fastest():
    points = grid_points({"a": (1, 2), "b": (1e-5, True)})
    assert [(point.number, point.text) for point in points] == [
        (1, "a=1, b=1e-05"), (2, "a=1, b=true"), (3, "a=2, b=1e-05"), (4, "a=2, b=true"),
    ]  # fmt: skip
    values = (5e-5, 64, None, "cosine", {"kind": "constant"})
    assert [value_text(value) for value in values] == ["5e-05", "64", "null", "cosine", "{kind: constant}"]
    for point in grid_points({"rl.optimizer.lr": (1e-5, 3e-4), "sft.num_traces": (64, None), "c": ({"kind": "d"},)}):
        read = {".".join(path): value for path, value in parse_overrides(point.overrides, "here")}
        assert read == dict(point.values)


def test_every_point_runs_with_every_seed(load):
    runs = load(GRID).reported_runs()
    assert [run.title for run in runs[:2]] == [
        "sizes 1 (sft.num_traces=4, sft.optimizer.lr=0.0001)", "sizes 1 (sft.num_traces=4, sft.optimizer.lr=0.001)",
    ]  # fmt: skip
    assert [(run.seed, run.config.sft.num_traces, run.config.sft.seed) for run in runs[3:5]] == [(1, 8, 1), (2, 4, 2)]
    assert len({run.folder for run in runs}) == len({run.config.name for run in runs}) == 8
    assert runs[0].nodes == ("prepare_data", "base", "sft", "evaluate_sft")
    over = ["sft.num_traces=[4, 8]", "sft.optimizer.lr=[1e-4, 1e-3]"]
    around = load_sweep(SMOKE, ["chain=sft", "method=sft"], over, [1, 2])
    assert [run.config.sft for run in around.reported_runs()] == [run.config.sft for run in runs]
    assert around.design.name == "smoke.grid"
    close = load_sweep(SMOKE, ["chain=sft", "method=sft"], ["sft.optimizer.lr=[0.1234567, 0.1234568]"])
    assert len({run.arm for run in close.reported_runs()}) == 2  # although six digits of them are equal
    own_seed = load_sweep(SMOKE, (), ["rl.steps=[2, 4]"]).reported_runs()
    assert [run.seed for run in own_seed] == [7, 7]


@pytest.mark.parametrize(
    ("overrides", "grid", "last", "methods", "heats"),
    [
        ("chain=expert_iteration", "stages.rounds.repeat: [1, 2]", "sft_1 sft_2", "None None", [1.0, 1.0]),
        ("chain=sft, method=sft", f"{HEAT}: [0.6, 1.0]", "sft sft", "sft sft", [0.6, 1.0]),
        ("chain=rl", "method: [luffy, dapo]", "rl rl", "luffy dapo", [1.0, 1.0]),
        ('"stages=[prepare_data, base, evaluate]"', "base.steps: [4, 8]", "base base", "None None", [1.0, 1.0]),
    ],
)
def test_a_grid_may_change_stages_evaluation_or_method(load, overrides, grid, last, methods, heats):
    text = f"name: sizes\nexperiment: {SMOKE}\noverrides: [{overrides}]\ngrid: {{{grid}}}\nseeds: [1]\n"
    runs = load(text).reported_runs()
    assert [run.nodes[-1] for run in runs] == [f"evaluate_{name}" for name in last.split()]
    assert [str(run.config.method) for run in runs] == methods.split()
    assert [run.config.evaluation.decodings["sampled"].temperature for run in runs] == heats


# What every arm of a comparison gets.


# Smoke.yaml makes two updates an RL step of 4 prompts.
CHAINED = f"""\
{HEAD}{STEPS}arms:
  luffy: {{chain: rl, method: luffy}}
  warmed: {{chain: warmed.yaml, method: on_policy}}
"""
WARMED = """\
stages:
  - prepare_data
  - base
  - warm: {kind: sft, method: sft, sft: {epochs: null, steps: 2}}
  - first: {kind: rl, method: luffy, rl: {steps: 2}}
  - rl: {rl: {temperature: 1.0}}
  - evaluate
"""
EACH_NAMED = WARMED.replace("temperature: 1.0}", "steps: 4}, method: luffy")
BUDGETS = [  # a file, an arm, and what its configuration gets
    (COMPARED, "sft", {"sft.steps": 12}),
    (COMPARED, "luffy", {"rl.steps": 12 // 2}),
    (COMPARED, "sft_then_rl", {"sft.steps": 4, "rl.steps": (12 - 4) // 2}),
    (HEAD + STEPS + ROUNDS, "luffy", {"rl.steps": 12 // 2}),
    (HEAD + STEPS + ROUNDS, "rounds", {"sft.steps": 12 // 3}),
    (HEAD + STEPS + ROUNDS, "then_rl", {"sft.steps": 6 // 3, "rl.steps": (12 - 6) // 2}),
]


def test_in_a_chain_of_stages_of_their_own_the_last_makes_what_the_others_leave_and_all_have_the_seed(load, tmp_path):
    (tmp_path / "warmed.yaml").write_text(WARMED)
    runs = [run for run in load(CHAINED).reported_runs() if run.arm == "warmed"]
    assert [run.nodes[3:] for run in runs] == [("warm", "first", "rl", "evaluate_rl")] * len(runs)
    for run in runs:
        warm, first, last = (run.config.seen_by(name) for name in ("warm", "first", "rl"))
        assert (warm.sft.steps, first.rl.steps, last.rl.steps) == (2, 2, (12 - 2 - 2 * 2) // 2)
        assert {warm.sft.seed, first.rl.seed, last.rl.seed} == {run.seed}
    (tmp_path / "warmed.yaml").write_text(EACH_NAMED)
    runs = load(changed(CHAINED, "warmed.yaml, method: on_policy", "warmed.yaml")).reported_runs()
    assert {run.config.seen_by("rl").method for run in runs if run.arm == "warmed"} == {"luffy"}


@pytest.mark.parametrize(
    ("text", "chain", "named"),
    [
        (changed(CHAINED, "12}", "6}"), WARMED, "budget.optimizer_steps 6 leaves 0 to rl"),
        (CHAINED, EACH_NAMED, "method: on_policy has no effect .. remove it"),
        (changed(CHAINED, "warmed.yaml, method: on_policy", "warmed.yaml"), WARMED, "method: missing"),
        (CHAINED, changed(WARMED, "epochs: null, steps: 2", "epochs: 1"), "stages.warm.sft.steps: missing"),
        (CHAINED, changed(WARMED, "{steps: 2}", "{steps: 2, temperature: 0.5}"), "rl.temperature is 0.5"),
        (CHAINED, changed(WARMED, "method: luffy", "method: luffy, seed: 3"), "stages.first.seed: the comparison's"),
        (CHAINED, changed(WARMED, "- evaluate", "- evaluate: {evaluation: {max_response_tokens: 16}}"),
         "stages.evaluate.evaluation: all arms"),
    ],
)  # fmt: skip
def test_a_chain_of_stages_of_their_own_that_is_unequal_is_one_line(load, tmp_path, text, chain, named):
    (tmp_path / "warmed.yaml").write_text(chain)
    with refused("arms.warmed", *named.split(" .. "), error=ConfigError):
        checked(load(text))


@pytest.mark.parametrize(("text", "arm", "expected"), BUDGETS)
def test_every_run_of_an_arm_spends_the_budget(load, text, arm, expected):
    configs = [run.config for run in load(text).reported_runs() if run.arm == arm]
    assert [{path: attrgetter(path)(config) for path in expected} for config in configs] == [expected] * len(configs)
    assert configs


def test_every_seed_runs_every_arm_over_the_same_base(load):
    sweep = load(COMPARED)
    runs = sweep.reported_runs()
    assert [run.title for run in runs] == [
        f"{arm} {seed}" for seed in (1, 2) for arm in ("sft", "luffy", "sft_then_rl")
    ]
    first, *_, last = runs
    assert (first.config.sft.seed, last.config.sft.seed, last.config.rl.seed) == (1, 2, 2)
    assert first.config.seed == last.config.seed == 7
    assert (first.config.name, last.config.name) == ("small.sft.1", "small.sft_then_rl.2")
    assert runs[2].nodes == ("prepare_data", "base", "evaluate_base", "sft", "rl", "evaluate_rl")
    assert sweep.common().kinds == ("prepare_data", "base", "evaluate")


def test_every_seed_samples_its_own_answers_in_every_round(load):
    runs = load(HEAD + STEPS + ROUNDS).reported_runs()
    nodes = {run.arm: " ".join(run.nodes[3:]) for run in runs}
    all_rounds = "sample_1 sft_1 sample_2 sft_2 sample_3 sft_3"
    assert (nodes["rounds"], nodes["then_rl"]) == (f"{all_rounds} evaluate_sft_3", f"{all_rounds} rl evaluate_rl")
    sampling = [run for run in runs if "sample_1" in run.nodes]
    sampled = [settings_in(run.config, "sample") for run in sampling]
    assert [settings.seed for settings in sampled] == [run.seed for run in sampling] == [1, 1, 2, 2]
    assert {run.config.seed for run in sampling} == {7}  # that of the base
    # A seed that is given and one that is not are the same stage.
    assert {settings.sample.seed for settings in sampled} == {None}


def test_overrides_are_of_all_arms_of_one_or_of_the_command_line(load):
    everyones = 'overrides: ["evaluation.max_response_tokens=16", data.validation_prompts=2, '
    looks = everyones + "'sft.validation={every: 4, source: validation}']\n"
    runs = load(HEAD + looks + STEPS + ARMS, "seeds=[5]", "arms.luffy.overrides=[rl.optimizer.lr=3e-4]").reported_runs()
    assert {run.config.evaluation.max_response_tokens for run in runs} == {16}
    assert [(run.arm, run.seed) for run in runs] == [("sft", 5), ("luffy", 5), ("sft_then_rl", 5)]
    assert runs[1].config.rl.optimizer.lr == 3e-4
    assert (runs[0].config.sft.steps, runs[0].config.sft.validation.every) == (12, 4)


def test_files_are_named_from_the_folder_of_the_file_that_names_them(load, tmp_path):
    shipped = SMOKE.parent / "methods" / "luffy.yaml"
    (tmp_path / "mine.yaml").write_text(f"extends: {shipped}\nobjective: {{advantage: {{zero_truncated: true}}}}\n")
    runs = load(changed(COMPARED, "method: luffy}", "method: mine.yaml}")).reported_runs()
    assert {run.config.objective.advantage.zero_truncated for run in runs if run.arm == "luffy"} == {True}
    assert load(changed(COMPARED, str(SMOKE), "smoke")).reported_runs() == load(COMPARED).reported_runs()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.yaml").write_text(f"extends: {SMOKE}\nname: base\n")
    (tmp_path / "shared" / "all.yaml").write_text(changed(COMPARED, str(SMOKE), "base.yaml"))
    assert load("extends: shared/all.yaml\nseeds: [7]\n").design.seeds == (7,)


# How arms are tuned.


def test_every_arm_tries_its_points_with_the_seeds_of_select_on_the_validation_split_alone(load):
    runs = load(TUNED).tuning_runs()
    assert [run.title for run in runs[:3]] == [
        "sft 100 (sft.optimizer.lr=0.0001)", "sft 100 (sft.optimizer.lr=0.001)", "luffy 100 (rl.optimizer.lr=0.0001)",
    ]  # fmt: skip
    assert len(runs) == 3 * 2 * 2 and len({run.folder for run in runs}) == len({run.config.name for run in runs}) == 12
    for run in runs:
        assert run.config.evaluation.only == ("validation",)
        assert list(run.config.evaluation.decodings) == ["greedy"]
        assert "evaluate_base" not in run.nodes and run.nodes[-1] == f"evaluate_{run.last}"
        assert {section.seed for section in (run.config.sft, run.config.rl)} == {run.seed}
    assert runs[1].config.sft.optimizer.lr == 1e-3


def test_what_was_chosen_runs_with_the_reported_seeds_on_the_reported_suites(load):
    sweep = load(TUNED)
    runs = sweep.reported_runs(chosen={"only": dict.fromkeys(sweep.design.arms, 2)})
    assert [run.title for run in runs[:4]] == ["sft 1", "luffy 1", "sft_then_rl 1", "sft 2"]
    assert runs[1].config.rl.optimizer.lr == 1e-3 and runs[1].config.rl.seed == 1
    assert {run.config.evaluation == sweep.common().evaluation for run in runs} == {True}
    assert sweep.common().evaluation.only is None
    assert {run.arm for run in sweep.reported_runs(chosen={"only": {"sft": 1}})} == {"sft"}


def test_a_suite_to_choose_on_is_not_reported(load):
    sweep = load(changed(TUNED, "on: validation", "on: longer"))
    reported = ("in_distribution", "other_mix", "retention")
    assert sweep.common().evaluation.only == reported
    assert {run.config.evaluation.only for run in sweep.tuning_runs()} == {("longer",)}
    assert {run.config.evaluation.only for run in sweep.reported_runs()} == {reported}


def test_a_grid_may_go_through_a_list_of_the_method(load):
    own = "grid: {objective.terms.off_policy.coefficient: [0.5, 1.0]}"
    tried = load(changed(TUNED, "method: luffy}", f"method: luffy, {own}}}")).candidates_of("luffy")
    assert [each.config.objective.terms[1].coefficient.value for each in tried] == [0.5, 1.0]


# The cells of a study.


def test_a_cell_has_what_is_its_own_and_the_rest_from_the_study():
    study = load_sweep("study_smoke")
    assert study.cells == ("centre", "budget-long", "heat-cool", "long_cool")
    runs = study.reported_runs()
    assert len(runs) == 2 * 2 + 3 * 2
    assert len(distinct(runs)) == 8  # SFT has no rollouts, so that their temperature changes nothing
    of = {(run.cell, run.arm, run.seed): run.config for run in runs}
    assert {of[cell, "luffy", 1].rl.steps for cell in ("centre", "heat-cool")} == {1}
    assert {of[cell, "luffy", 1].rl.steps for cell in ("budget-long", "long_cool")} == {2}
    assert [of[cell, "luffy", 1].rl.temperature for cell in study.cells] == [1.0, 1.0, 0.8, 0.8]


def test_values_chosen_in_one_cell_hold_in_all_or_every_cell_tunes_its_own(load):
    study = load(STUDY)
    assert len(study.tuning_runs(["heat-cool"])) == 2 * 2
    runs = study.reported_runs(chosen={"centre": {"luffy": 2}})
    assert {run.arm for run in runs} == {"luffy"}  # nothing is chosen for SFT yet
    assert {(run.point.number, run.config.rl.optimizer.lr) for run in runs} == {(2, 3e-3)}
    elsewhere = load(changed(STUDY, "tuned_at: centre", "tuned_at: heat-cool"))
    assert {run.cell for run in elsewhere.tuning_runs(["centre"])} == {"heat-cool"}
    study = load(changed(STUDY, "tuned_at: centre\n", ""))
    assert len(study.tuning_runs()) == 4 * 4
    assert {run.cell for run in study.reported_runs(chosen={"heat-cool": {"luffy": 2}})} == {"heat-cool"}


def test_each_seed_of_a_study_can_start_from_a_base_of_its_own(load):
    overrides = "overrides: [evaluation.max_response_tokens=16, base.steps=4,"
    assert load(STUDY).repeated_over == "seeds"
    study = load(changed(STUDY, overrides, f"overrides: {BASES[:-1]}, evaluation.max_response_tokens=16,"))
    assert study.repeated_over == "bases"
    runs = [*study.tuning_runs(), *study.reported_runs()]
    assert {run.seed for run in runs} == {100, 1, 2}
    assert all(run.config.model.path == f"bases/{run.seed}" for run in runs)
    assert study.common().model.path == "bases/1"
    needed = study.started_with(["heat-cool"])
    assert {config.model.path for config in needed} == {"bases/100", "bases/1"} and len(needed) == 2 * 2 + 1
    assert len({run.made_as for run in runs if (run.cell, run.arm) == ("centre", "sft")}) == 4  # two tries


@pytest.mark.slow  # loads every arm in every cell
def test_the_design_page_counts_what_the_design_has():
    study = load_sweep(DESIGN)
    study.check(study.cells)
    text = " ".join(DESIGN.with_suffix(".md").read_text().split())
    tuning, reported = (len(distinct(runs)) for runs in (study.tuning_runs(), study.reported_runs()))
    words = dict(zip(range(5, 9), ("five", "six", "seven", "eight"), strict=True))
    assert f"| cells | {words[len(study.cells)]}: " in text
    assert f"| runs | {tuning} to tune, {reported} to report |" in text
    assert f"| bases | {words[len(study.design.seeds)]} for each kind" in text
    assert f"{len(study.design.planned)} tests are planned" in text


# Mistakes: one line that says where, with `..` between what it has to name.


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rl.steps=9", "rl.steps .. budget"),
        ("sft.epochs=9", "sft.epochs .. budget"),
        ("sample.seed=3", "sample.seed .. the comparison's seeds"),
        ("data.train.num_prompts=9", "data.train.num_prompts .. all arms share it"),
        ("data={}", "data .. all arms share it"),
        ("method=dapo", "chain and method"),
        ("rl={steps: 9}", "rl.FIELD=VALUE"),
        ("sample={num_samples: 2}", "the fields of sample one by one"),
        ("rl.prompts_per_step=8", "rl.prompts_per_step is 8 .. luffy 4"),
        ("rl.prompts_per_update=4", "rl.prompts_per_update is 4 .. luffy 2"),
        ("rl.passes=2", "rl.passes is 2 .. luffy 1"),
        ("rl.stop=['</answer>']", "rl.stop is ('</answer>',) .. luffy ()"),
        ("objective.group.size=4", "objective.group.size is 4 .. luffy 8"),
        ("rl.temperature=0.5", "rl.temperature is 0.5 .. luffy 1.0"),
        ("cluster=ray", "cluster .. luffy"),
        ("rl.stepz=9", "rl.stepz: unknown key"),
        ("stages.rl.rl.steps=9", "stages.rl.rl.steps .. budget"),
        ("stages=[prepare_data]", "stages .. the arm's chain"),
    ],
)
def test_an_arm_cannot_be_unequal(load, override, named):
    other = f'{{chain: rl, method: on_policy, overrides: ["{override}"]}}'
    with refused("many.yaml:8: arms.other", *named.split(" .. "), error=ConfigError):
        checked(load(HEAD + STEPS + f"arms:\n  luffy: {{chain: rl, method: luffy}}\n  other: {other}\n"))


LR = "rl.optimizer.lr: [1e-4, 1e-3]"
BASES = '[data.corpus=null, base=null, model.architecture=null, "model.path=bases/{seed}"]'
BASE_ALONE = changed(GRID, "[chain=sft, method=sft]", '["stages=[prepare_data, base, evaluate]"]')
UNTUNED = re.sub(", grid: {[^}]*}", "", STUDY)
SELECTED = "select: {on: validation, seeds: [100]}\n"
CELLS = STUDY[STUDY.index("cells:") : STUDY.index("primary:")]
TUNED_ON_LONGER = changed(TUNED, "on: validation", "on: longer")


@pytest.mark.parametrize(
    ("text", "old", "new", "named"),
    [
        # The budget.
        (COMPARED, "{optimizer_steps: 12}", "{}", "budget.optimizer_steps: is missing"),
        (COMPARED, ", sft_steps: 4", "", "arms.sft_then_rl: sft_steps: missing"),
        (COMPARED, "sft_steps: 4", "sft_steps: 5", "leaves 7 to RL"),
        (COMPARED, "sft_steps: 4", "sft_steps: 12", "leaves 0 to RL"),
        (COMPARED, "method: sft}", "method: sft, sft_steps: 2}", "sft_steps has no effect"),
        (COMPARED, "seeds: ", 'overrides: ["rl.steps=9"]\nseeds: ', "many.yaml:3: overrides: rl.steps"),
        (COMPARED, "12}", "12, tokens: 9}", "budget.tokens: is gone; give optimizer_steps"),
        (COMPARED, "sft_steps: 4", "sft_tokens: 4", "sft_tokens: is gone; give sft_steps"),
        (HEAD + STEPS + ROUNDS, "12", "10", "arms.rounds: 10 optimizer steps .. 3 stages of kind sft"),
        # Keys, names and files.
        (COMPARED, "reference: luffy", "reference: lufy", "reference: .. 'lufy'"),
        (COMPARED, "reference: luffy\n", "", "reference: is missing"),
        (COMPARED, "[1, 2]", "[1, 1]", "seeds: 1 is listed twice"),
        (COMPARED, "chain: rl,", "chain: rll,", "no preset 'rll' in exp_configs/chains/"),
        (COMPARED, "method: luffy", "method: other.yaml", "many.yaml:8: arms.luffy: method: other.yaml"),
        (COMPARED, ARMS, "arms: {luffy: {chain: rl, method: luffy}}\n", "arms: needs at least 2, found 1"),
        (COMPARED, STEPS, STEPS + "rl: {steps: 9}\n", "rl: unknown key .. overrides: [rl.FIELD=VALUE]"),
        (COMPARED, STEPS, STEPS + "method: luffy\n", "method: unknown key .. arms.NAME.method"),
        (COMPARED, STEPS, STEPS + "seed: 1\n", "seed: unknown key .. 'seeds'"),
        (COMPARED, STEPS, STEPS + "tuned_at: only\n", "tuned_at: has no effect in a comparison .. arms"),
        (COMPARED, str(SMOKE), "smok.yaml", "many.yaml:2: experiment: smok.yaml .. 'smoke'"),
        # Tuning.
        (TUNED, "rl.optimizer.lr", "rl.prompts_per_step", "grid: rl.prompts_per_step .. all arms"),
        (TUNED, "rl.optimizer.lr", "data.train.num_prompts", "all arms share it"),
        (TUNED, "rl.optimizer.lr", "rl.seed", "rl.seed .. the comparison's seeds"),
        (TUNED, "rl.optimizer.lr", "method", "chain and method"),
        (TUNED, "grid: {rl.optimizer.lr", "grid: {sft.optimizer.lr", "changes nothing in this arm"),
        (TUNED, LR, "rl.optimizer.lr: [1e-3, 0.001]", "0.001 is listed twice"),
        (TUNED, LR, "rl.optimizer.lr: [1e-4, 2e-4, 1e-3]", "the same number of points"),
        (TUNED, f"grid: {{{LR}}}\n", "", "arms.luffy: grid: has 1 points .. 2"),
        (TUNED, "select: {on: validation, seeds: [100, 101]}\n", "", "select: missing"),
        (COMPARED, STEPS, STEPS + "select: {seeds: [100]}\n", "select: .. grid"),
        (TUNED, "[100, 101]", "[100, 2]", "select.seeds: 2 is also reported"),
        (TUNED, "[100, 101]", "[100], random: 3", "select.random: is gone; every point"),
        (TUNED, "[100, 101]", "[100], decoding: greed", "decoding: .. 'greed' .. greedy"),
        (TUNED, "on: validation", "on: longr", "select.on: .. 'longr'"),
        (TUNED, "validation_prompts=4", "validation_prompts=0", "select.on: the validation split has no prompts"),
        (TUNED_ON_LONGER, "overrides: [data", 'overrides: ["evaluation.only=[longer, retention]", data',
         "select.on: longer .. evaluation.only"),
        # Grids.
        (GRID, "sft.num_traces: [4, 8]", "rl.steps: [4, 8]", "are the same run"),
        (GRID, "sft.num_traces: [4, 8]", "sft.seed: [4, 8]", "sft.seed .. seeds"),
        (GRID, "sft.num_traces: [4, 8]", "name: [a, b]", "name cannot be tried"),
        (GRID, "chain=sft", f"{BASES[1:-1]}, chain=sft", "model.path: {seed} .. a study alone"),
        (GRID, "seeds", "budget: {optimizer_steps: 4}\nseeds", "budget: has no effect in a grid .. experiment"),
        (BASE_ALONE, f"sft.num_traces: [4, 8], sft.{LR[3:]}", "base.steps: [4, 8]", "seeds: .. sft or rl"),
        # Studies.
        (STUDY, "arms: [luffy]}", "arms: [chord]}", "no arm is called 'chord'"),
        (STUDY, "arms: [luffy]}", "arms: [luffy], against: chord}", "no arm is called 'chord'"),
        (STUDY, "arms: [luffy]}", "arms: [luffy], against: luffy}", "luffy is what it is tested against"),
        (STUDY, "arms: [luffy]}", "arms: [sft]}", "sft is the reference"),
        (STUDY, "arms: [luffy]}", "arms: [luffy]}\n  - {cells: [centre], arms: [sft], against: luffy}",
         "sft against luffy in centre is planned twice"),
        (STUDY, "tuned_at: centre", "tuned_at: cell",
         "many.yaml:11: tuned_at: no cell is called 'cell' .. centre, budget-long .. without"),
        (UNTUNED, SELECTED, "", "many.yaml:10: tuned_at: has no effect without select"),
        (STUDY, "two cool steps", "two steps", "cells.heat-cool.label: is also that of cell centre"),
        (STUDY, "label: two cool steps", "label: ''", "many.yaml:18: cells.heat-cool.label: must not be empty"),
        (STUDY, "  heat-cool:", "  heat.cool:", "heat.cool .. small letters, digits and _ -"),
        (STUDY, CELLS, "cells: {}\n", "cells: needs at least 1"),
        (STUDY, "cells:\n", "axes: {}\ncells:\n", "many.yaml:15: axes: is gone .. cells: {NAME: {label: TEXT"),
        (STUDY, "cells:\n", "interactions: {a: {}}\ncells:\n", "many.yaml:15: interactions: is gone .. as a cell"),
        (STUDY, "seeds: [1, 2]", "seeds_elsewhere: [1]\nseeds: [1, 2]", "seeds_elsewhere: is gone .. cells.NAME.seeds"),
        (STUDY, "[rl.temperature=0.8]}", "[rl.steps=9]}",
         "cell heat-cool: .. many.yaml:18: cells.heat-cool: overrides: rl.steps .. budget"),
        (STUDY, "cells: [centre, budget-long]", "cells: [center]", "did you mean 'centre'? there are centre, budget-"),
        (STUDY, "suite: in_distribution", "suite: in_dist", "primary.suite: no suite .. 'in_distribution'"),
        (STUDY, "[rl.temperature=0.8]}", BASES + "}", "cell heat-cool .. many.yaml:18: cells.heat-cool: model.path"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_says_where(load, text, old, new, named):
    with refused("many.yaml", *named.split(" .. "), error=ConfigError):
        checked(load(changed(text, old, new)))


@pytest.mark.parametrize(
    ("file", "options", "named"),
    [
        # Options of the command line are those of an experiment.
        ("grid_sft_size", {"over": ["rl.steps=[1]"]}, "--over has no effect on"),
        ("grid_sft_size", {"seeds": [1]}, "--seed has no effect on"),
        ("smoke", {}, "is an experiment .. --over"),
        ("smoke", {"over": ["rl.steps=4"]}, "--over: rl.steps must be a list"),
        ("smoke", {"over": ["rl.steps=[4]"] * 2}, "--over: rl.steps is given twice"),
    ],
)
def test_options_of_an_experiment_are_refused_elsewhere_and_needed_there(file, options, named):
    with refused(*named.split(" .. "), error=ConfigError):
        load_sweep(file, **options)


def test_files_of_one_name_in_two_folders_make_two_runs():
    a, b = (load_experiment("smoke", [f"data.train={{kind: file, path: {folder}/rows.jsonl}}"]) for folder in "ab")
    assert made_as(a) != made_as(b)

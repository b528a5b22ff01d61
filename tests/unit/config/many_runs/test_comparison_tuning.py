"""A comparison whose arms are tuned: equal tries, on problems and seeds that are not reported."""

from pathlib import Path

import pytest

from luffy.config.many_runs.comparison import load_comparison
from luffy.errors import ConfigError

SMOKE = Path(__file__).parents[4] / "exp_configs" / "smoke.yaml"
HEAD = f"""\
name: small
experiment: {SMOKE}
overrides: [data.validation_prompts=4]
seeds: [1, 2]
reference: luffy
budget: {{optimizer_steps: 12}}
"""
SELECT = "select: {on: validation, seeds: [100, 101]}\n"
GRID = "grid: {rl.optimizer.lr: [1e-4, 1e-3]}\n"
ARMS = """\
arms:
  sft: {chain: sft, method: sft, grid: {sft.optimizer.lr: [1e-4, 1e-3]}}
  luffy: {chain: rl, method: luffy}
  sft_then_rl: {chain: sft_then_rl, method: on_policy, sft_steps: 4}
"""


@pytest.fixture
def load(tmp_path):
    def loaded(text, *overrides):
        file = tmp_path / "compare.yaml"
        file.write_text(text)
        return load_comparison(file, overrides)

    return loaded


@pytest.fixture
def complaint(load):
    def said(text, *overrides):
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return said


def test_every_arm_tries_its_points_with_the_seeds_of_select_on_the_validation_split_alone(load):
    comparison = load(HEAD + SELECT + GRID + ARMS)
    runs = comparison.tuning_runs
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
    comparison = load(HEAD + SELECT + GRID + ARMS)
    chosen = {name: comparison.candidates_of(name)[1] for name in comparison.config.arms}
    runs = comparison.reported_runs(chosen)
    assert [run.title for run in runs[:4]] == ["sft 1", "luffy 1", "sft_then_rl 1", "sft 2"]
    assert runs[1].config.rl.optimizer.lr == 1e-3 and runs[1].config.rl.seed == 1
    assert {run.config.evaluation == comparison.shared.evaluation for run in runs} == {True}
    assert comparison.shared.evaluation.only is None
    assert comparison.num_runs == 12 + 6


def test_a_suite_to_choose_on_is_not_reported(load):
    comparison = load(HEAD + SELECT.replace("validation", "longer") + GRID + ARMS)
    reported = ("in_distribution", "other_mix", "retention")
    assert comparison.shared.evaluation.only == reported
    assert {run.config.evaluation.only for run in comparison.tuning_runs} == {("longer",)}
    first = {each.arm: each for each in reversed(comparison.candidates)}
    assert {run.config.evaluation.only for run in comparison.reported_runs(first)} == {reported}


def test_a_random_draw_gives_every_arm_equal_tries_from_grids_of_any_size(load):
    arms = ARMS.replace("sft.optimizer.lr: [1e-4, 1e-3]", "sft.optimizer.lr: [1e-4, 2e-4, 5e-4, 1e-3]")
    text = HEAD + SELECT.replace("101]", "101], random: 2") + GRID + arms
    comparison = load(text)
    assert {len(comparison.candidates_of(arm)) for arm in comparison.config.arms} == {2}
    assert comparison.candidates == load(text).candidates
    # Arms with the same grid get the same points.
    drawn = [[each.point for each in comparison.candidates_of(arm)] for arm in ("luffy", "sft_then_rl")]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("change", "to", "says"),
    [
        (
            "rl.optimizer.lr",
            "rl.prompts_per_step",
            "grid: rl.prompts_per_step cannot be overridden here: it must be the same in all arms",
        ),
        ("rl.optimizer.lr", "rl.steps", "grid: rl.steps cannot be overridden here: it would change the budget"),
        ("rl.optimizer.lr", "data.train.num_prompts", "all arms share it"),
        ("rl.optimizer.lr", "rl.seed", "the comparison's seeds decide it"),
        ("rl.optimizer.lr", "method", "chain and method"),
        ("rl.optimizer.lr", "rl.optimizer.lrr", "rl.optimizer.lrr: unknown key"),
        ("rl.optimizer.lr", "sft.optimizer.lr", "are the same run: a key of them changes nothing in this arm"),
        ("rl.optimizer.lr: [1e-4, 1e-3]", "rl.optimizer.lr: []", "grid.rl.optimizer.lr"),
        ("rl.optimizer.lr: [1e-4, 1e-3]", "rl.optimizer.lr: [1e-3, 0.001]", "0.001 is listed twice"),
        (
            "rl.optimizer.lr: [1e-4, 1e-3]",
            "rl.optimizer.lr: [1e-4, 2e-4, 1e-3]",
            "every arm needs the same number of points",
        ),
        (GRID, "", "arms.luffy: grid: has 1 points, and that of arm sft 2: every arm needs the same number of points"),
        (SELECT, "", "select: missing; a grid needs it"),
        ("[100, 101]", "[100, 2]", "select.seeds: 2 is also reported"),
        ("[100, 101]", "[100, 100]", "give each seed once"),
        ("[100, 101]", "[100, 101], halving: {min_resource: 6}", "select.halving: unknown key"),
        ("[100, 101]", "[100], random: 3", "arms.sft: grid: has 2 of the 3 points of select.random"),
        ("[100, 101]", "[100], decoding: greed", "select.decoding: no decoding is called 'greed'; there are greedy"),
        ("on: validation", "on: longr", "select.on: no suite is called 'longr'"),
        ("validation_prompts=4", "validation_prompts=0", "select.on: the validation split has no prompts"),
        ("on: validation", "on: longer", None),
    ],
)
def test_what_would_make_tuning_unfair_is_one_line_that_says_where(complaint, load, change, to, says):
    text = HEAD + SELECT + GRID + ARMS
    assert change in text
    if says is None:
        load(text.replace(change, to))
        only = 'overrides: ["evaluation.only=[longer, retention]", '
        said = complaint(text.replace(change, to).replace("overrides: [", only))
        assert "select.on: longer is also reported (evaluation.only)" in said
        return
    said = complaint(text.replace(change, to))
    assert says in said and "compare.yaml" in said


def test_select_without_a_grid_has_no_effect(complaint):
    arms = ARMS.replace(", grid: {sft.optimizer.lr: [1e-4, 1e-3]}", "")
    assert "select: has no effect without a grid" in complaint(HEAD + SELECT + arms)


def test_a_grid_may_go_through_a_list_of_the_method(load):
    own = "grid: {objective.terms.off_policy.coefficient: [0.5, 1.0]}"
    arms = ARMS.replace("method: luffy}", f"method: luffy, {own}}}")
    tried = load(HEAD + SELECT + GRID + arms).candidates_of("luffy")
    terms = [{term.name: term.coefficient for term in each.config.objective.terms} for each in tried]
    assert [named["off_policy"].value for named in terms] == [0.5, 1.0]

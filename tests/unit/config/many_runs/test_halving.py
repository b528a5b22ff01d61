"""Rungs of successive halving: their arithmetic, the runs of each, and what cannot have any."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.config.many_runs.comparison import load_comparison
from luffy.config.many_runs.comparison_config import HalvingConfig
from luffy.config.many_runs.halving import rungs_of
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.errors import ConfigError
from luffy.pipeline.chain.identity import identity_of

SMOKE = Path(__file__).parents[4] / "exp_configs" / "smoke.yaml"
TEXT = f"""\
name: small
experiment: {SMOKE}
overrides: [data.validation_prompts=4, "sft.optimizer.schedule={{kind: constant}}"]
seeds: [1]
reference: luffy
budget: {{optimizer_steps: 24}}
select: {{on: validation, seeds: [100, 101], halving: {{min_resource: 6}}}}
grid: {{rl.optimizer.lr: [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]}}
arms:
  sft: {{chain: sft, method: sft, grid: {{sft.optimizer.lr: [1e-5, 1e-4, 1e-3, 1e-2, 1e-1]}}}}
  luffy: {{chain: rl, method: luffy}}
  sft_then_rl: {{chain: sft_then_rl, method: on_policy, sft_steps: 4}}
"""


@pytest.fixture
def load(tmp_path):
    def loaded(text, *overrides):
        file = tmp_path / "compare.yaml"
        file.write_text(text)
        return load_comparison(file, overrides)

    return loaded


@given(st.integers(2, 9), st.integers(1, 500), st.integers(1, 5000), st.integers(1, 300))
def test_rungs_grow_to_the_budget_while_tries_shrink_and_never_take_more_than_a_full_grid(eta, least, budget, points):
    rungs = rungs_of(HalvingConfig(eta=eta, min_resource=least), budget, points)
    assert [rung.number for rung in rungs] == [*range(1, len(rungs) + 1)]
    assert (rungs[0].num_tries, rungs[-1].resource) == (points, budget)
    for before, after in pairwise(rungs):
        assert least <= before.resource < after.resource
        # At least 1/eta of the tries go on, and less than one more than that.
        assert 0 <= after.num_tries * eta - before.num_tries < eta
    steps = [rung.resource - before for rung, before in zip(rungs, [0, *(r.resource for r in rungs)], strict=False)]
    assert sum(rung.num_tries * more for rung, more in zip(rungs, steps, strict=True)) <= budget * points


def test_the_tries_of_a_rung_are_those_of_the_last_one_with_fewer_steps(load):
    comparison = load(TEXT)
    assert [(rung.resource, rung.num_tries) for rung in comparison.rungs] == [(6, 5), (12, 3), (24, 2)]
    assert comparison.num_runs == (5 + 3 + 2) * 2 * 3 + 3
    sft, luffy, cold = (comparison.candidates_of(arm)[0] for arm in comparison.config.arms)
    rungs = [comparison.runs_at(rung, [sft, luffy, cold]) for rung in comparison.rungs]
    # An RL step of smoke.yaml makes two updates.
    assert [runs[0].config.sft.steps for runs in rungs] == [6, 12, 24]
    assert [runs[1].config.rl.steps for runs in rungs] == [3, 6, 12]
    assert [(runs[2].config.sft.steps, runs[2].config.rl.steps) for runs in rungs] == [(4, 1), (4, 4), (4, 10)]
    assert rungs[1][1].title == "luffy 100 (rl.optimizer.lr=1e-05, rung 2)"
    assert len({run.folder for runs in rungs for run in runs}) == 3 * 3 * 2


def test_every_rung_continues_the_one_before(load):
    comparison = load(TEXT)
    for arm, stage in (("sft", "sft"), ("luffy", "rl"), ("sft_then_rl", "rl")):
        runs = [comparison.runs_at(rung, [comparison.candidates_of(arm)[1]])[0].config for rung in comparison.rungs]
        series = {identity_of(stage, STAGE_KINDS[stage].configure(config), {}, {}, {}).series for config in runs}
        assert len(series) == 1 and None not in series
        assert [config.execution.checkpoint.sft_last for config in runs] == [arm == "sft", arm == "sft", False]


def test_a_budget_of_rollouts_has_rungs_of_rollouts(load):
    text = TEXT.replace("optimizer_steps: 24", "rollouts: 448").replace("min_resource: 6", "min_resource: 112")
    arms = "arms:\n  luffy: {chain: rl, method: luffy}\n  grpo: {chain: rl, method: luffy_no_shaping}\n"
    comparison = load(text[: text.index("arms:")] + arms)
    runs = [comparison.runs_at(rung, comparison.candidates[:1])[0] for rung in comparison.rungs]
    assert [run.config.rl.steps for run in runs] == [448 // 28 // 4, 448 // 28 // 2, 448 // 28]


@pytest.mark.parametrize(
    ("change", "to", "says"),
    [
        ("min_resource: 6", "min_resource: 13", "select.halving.min_resource: 13 leaves no rung below the budget"),
        ("min_resource: 6", "min_resource: 1", "of which the best 1/2 go on, leave one for the last of 5 rungs"),
        ("min_resource: 6", "min_resource: 6, eta: 1", "select.halving.eta"),
        ("steps: 24", "steps: 26", "arms.luffy: select.halving: 13 optimizer steps end within an RL step"),
        ("sft_steps: 4", "sft_steps: 6", "arms.sft_then_rl: select.halving: 6 optimizer steps leave no step to RL"),
        ("optimizer_steps: 24", "tokens: 900, max_optimizer_steps: 9", "has no rungs under budget.tokens"),
        ("{kind: constant}", "{kind: cosine}", "arms.sft: select.halving: sft.optimizer.schedule depends on how many"),
        ("method: luffy}", "method: luffy, overrides: [rl.optimizer.schedule.kind=linear]}", "rl.optimizer.schedule"),
        ("chain: sft, method: sft", "chain: rft, method: sft", "the rounds of chain rft cannot be continued by longer"),
        (
            "method: luffy}",
            "method: luffy, overrides: ['rl.validation={every: 2, source: validation}']}",
            "arms.luffy: select.halving: rl.validation depends on how many steps its stage makes, here 3 on rung 1",
        ),
        (
            "method: luffy}",
            "method: luffy, overrides: ['rl.validation={every: 3, source: validation, keep_best: {}}']}",
            "let its every divide the steps of all rungs, without keep_best, or remove select.halving",
        ),
        ("min_resource: 6", "min_resource: 6, eta: 25", "select.halving.eta: 25 is above the budget of 24 optimizer"),
    ],
)  # fmt: skip
def test_what_has_no_rungs_or_cannot_continue_is_one_line_that_says_where(load, change, to, says):
    assert change in TEXT
    with pytest.raises(ConfigError) as caught:
        load(TEXT.replace(change, to))
    assert says in str(caught.value) and "compare.yaml" in str(caught.value) and "\n" not in str(caught.value)

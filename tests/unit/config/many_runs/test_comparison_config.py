"""A comparison: what every arm gets is equal, and whatever would make it unequal is refused in one line."""

from pathlib import Path

import pytest

from luffy.config.many_runs.comparison import load_comparison
from luffy.config.settings import CONFIGURE
from luffy.errors import ConfigError

SMOKE = Path(__file__).parents[4] / "exp_configs" / "smoke.yaml"
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


@pytest.fixture
def load(tmp_path):
    def loaded(text, *overrides):
        file = tmp_path / "compare.yaml"
        file.write_text(text)
        return load_comparison(file, overrides)

    return loaded


def complaint(load, *arguments):
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_arm_finds_a_preset_of_its_own_from_the_comparisons_folder(load, tmp_path):
    shipped = SMOKE.parent / "methods" / "luffy.yaml"
    (tmp_path / "mine.yaml").write_text(f"extends: {shipped}\nobjective: {{advantage: {{on_policy_scale: 0.5}}}}\n")
    runs = load(HEAD + STEPS + ARMS.replace("method: luffy}", "method: mine.yaml}")).runs
    assert {run.config.objective.advantage.on_policy_scale for run in runs if run.arm == "luffy"} == {0.5}
    message = complaint(load, HEAD + STEPS + ARMS.replace("method: luffy}", "method: other.yaml}"))
    assert f"compare.yaml:8: arms.luffy: method: other.yaml: no such file; give a path from {tmp_path}" in message


def updates(run):
    """Optimizer steps after the base."""
    config = run.config
    sft = config.sft.num_steps(10**9) if "sft" in config.stages else 0
    return sft + (config.rl.steps * config.rl.updates_per_step if "rl" in config.stages else 0)


def test_every_run_makes_the_optimizer_steps_of_the_budget(load):
    comparison = load(HEAD + STEPS + ARMS)
    assert [run.title for run in comparison.runs] == [
        "sft 1", "luffy 1", "sft_then_rl 1", "sft 2", "luffy 2", "sft_then_rl 2",
    ]  # fmt: skip
    assert [updates(run) for run in comparison.runs] == [12] * 6
    # smoke.yaml makes two updates an RL step.
    assert [run.config.rl.steps for run in comparison.runs[1:3]] == [6, 4]


def test_an_arm_may_look_at_held_out_prompts_while_sft_trains(load):
    looks = "overrides: ['sft.validation={every: 4, source: validation}', data.validation_prompts=2]\n"
    sft, *_ = load(HEAD + looks + STEPS + ARMS).runs
    assert (sft.config.sft.steps, sft.config.sft.validation.every) == (12, 4)


def test_seeds_are_those_of_the_stages_that_learn(load):
    first, *_, last = load(HEAD + STEPS + ARMS).runs
    assert (first.config.sft.seed, last.config.sft.seed, last.config.rl.seed) == (1, 2, 2)
    assert first.config.seed == last.config.seed == 7
    assert (first.config.name, last.config.name) == ("small.sft.1", "small.sft_then_rl.2")


def test_runs_need_no_report_and_no_evaluation_on_the_way(load):
    comparison = load(HEAD + STEPS + ARMS)
    assert comparison.runs[2].nodes == ("prepare_data", "base", "evaluate_base", "sft", "rl", "evaluate_rl")
    assert comparison.shared.stages == ("prepare_data", "base", "evaluate")


def test_a_budget_of_rollouts_counts_what_the_policy_draws(load):
    arms = "arms:\n  luffy: {chain: rl, method: luffy}\n  on_policy: {chain: rl, method: on_policy}\n"
    luffy, on_policy = load(HEAD.replace("[1, 2]", "[1]") + "budget: {rollouts: 448}\n" + arms).runs
    # 4 prompts a step; LUFFY draws 7 of 8 rows, on-policy RL all 8.
    assert (luffy.config.rl.steps, on_policy.config.rl.steps) == (448 // 28, 448 // 32)
    message = complaint(load, HEAD + "budget: {rollouts: 100}\n" + arms)
    assert "samples 28 rollouts a step (4 prompts x 7), and budget.rollouts 100 is not a multiple of that" in message


@pytest.mark.parametrize(
    ("arm", "says"),
    [
        ("{chain: sft, method: sft}", "samples no rollouts"),
        ("{chain: rl, method: dapo}", "how many rollouts dapo samples in a step depends on their rewards"),
        ("{chain: rl, method: luffy_prefix}", "depends on their rewards"),
    ],
)
def test_a_budget_of_rollouts_refuses_arms_that_it_does_not_bound(load, arm, says):
    arms = f"arms:\n  luffy: {{chain: rl, method: luffy}}\n  other: {arm}\n"
    assert says in complaint(load, HEAD + "budget: {rollouts: 448}\n" + arms)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rl.steps=9", "rl.steps cannot be overridden here: it would change the budget"),
        ("sft.epochs=9", "sft.epochs cannot be overridden here: it would change the budget"),
        ("rl.seed=3", "the comparison's seeds decide it"),
        ("sample.seed=3", "the comparison's seeds decide it"),
        ("data.train.num_prompts=9", "all arms share it"),
        ("data={}", "all arms share it"),
        ("method=dapo", "chain and method"),
        ("rl={steps: 9}", "give the fields of rl one by one (rl.FIELD=VALUE)"),
        ("sample={num_samples: 2}", "give the fields of sample one by one"),
        ("rl.prompts_per_step=8", "rl.prompts_per_step is 8, and that of arm luffy 4"),
        ("rl.prompts_per_update=4", "rl.prompts_per_update is 4, and that of arm luffy 2"),
        ("rl.passes=2", "rl.passes is 2, and that of arm luffy 1"),
        ("rl.stop=['</answer>']", "rl.stop is ('</answer>',), and that of arm luffy ()"),
        ("objective.group.size=4", "objective.group.size is 4, and that of arm luffy 8"),
        ("rl.temperature=0.5", "rl.temperature is 0.5, and that of arm luffy 1.0"),
        ("cluster=ray", "cluster is not that of arm luffy"),
        ("rl.stepz=9", "rl.stepz: unknown key"),
        ("rl.optimizer.lr", "is not of the form key.path=value"),
    ],
)
def test_an_arm_cannot_be_unequal(load, override, says):
    other = f'{{chain: rl, method: on_policy, overrides: ["{override}"]}}'
    arms = f"arms:\n  luffy: {{chain: rl, method: luffy}}\n  other: {other}\n"
    message = complaint(load, HEAD + STEPS + arms)
    assert says in message
    assert "compare.yaml:8: arms.other" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD + "budget: {}\n" + ARMS, "give exactly one of optimizer_steps, rollouts and tokens"),
        (HEAD + "budget: {optimizer_steps: 4, rollouts: 4}\n" + ARMS, "give exactly one of"),
        (HEAD + STEPS + ARMS.replace(", sft_steps: 4", ""), "arms.sft_then_rl: sft_steps: missing"),
        (
            HEAD + STEPS + ARMS.replace("sft_steps: 4", "sft_steps: 5"),
            "leaves 7 to RL, which is not a positive multiple",
        ),
        (HEAD + STEPS + ARMS.replace("sft_steps: 4", "sft_steps: 12"), "leaves 0 to RL"),
        (HEAD + STEPS + ARMS.replace("method: sft}", "method: sft, sft_steps: 2}"), "sft_steps has no effect"),
        (HEAD.replace("luffy\n", "lufy\n") + STEPS + ARMS, "reference: no arm is called 'lufy'"),
        (HEAD.replace("[1, 2]", "[1, 1]") + STEPS + ARMS, "seeds: give each seed once"),
        (HEAD + STEPS + ARMS.replace("chain: rl", "chain: rll"), "no preset 'rll' in exp_configs/chains/"),
        (HEAD + STEPS + ARMS.replace("method: luffy", "metod: luffy"), "did you mean 'method'?"),
        (HEAD + STEPS + "arms: {luffy: {chain: rl, method: luffy}}\n", "arms"),
        (HEAD + 'overrides: ["rl.steps=9"]\n' + STEPS + ARMS, "compare.yaml:5: overrides: rl.steps cannot be"),
    ],
)
def test_a_mistake_is_one_line_that_says_where(load, text, says):
    with pytest.raises(ConfigError) as caught:
        load(text)
    messages = str(caught.value).splitlines()
    assert any(says in message for message in messages)
    assert "compare.yaml" in str(caught.value) or "smoke.yaml" in str(caught.value)


def test_an_experiment_is_no_comparison(load):
    found = complaint(load, SMOKE.read_text())
    assert "is an experiment, not a comparison of methods; run it with: luffy run" in found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rl: {steps: 9}\n", "rl: unknown key; fields of the experiment go into the list overrides: [rl.FIELD=VALUE]"),
        (
            "cluster: ray\n",
            "cluster: unknown key; fields of the experiment go into the list overrides: [cluster=VALUE]",
        ),
        ("method: luffy\n", "method: unknown key; each arm has its own: arms.NAME.method"),
        ("seed: 1\n", "seed: unknown key; did you mean 'seeds'?"),
        ("arms: {a.b: {chain: rl, method: luffy}}\n", "digits and _ - only, a letter or digit first, found 'a.b'"),
    ],
)
def test_a_key_in_the_wrong_place_is_told_its_place(load, text, says):
    arms = "" if text.startswith("arms") else ARMS
    assert says in complaint(load, HEAD + STEPS + arms + text)


def test_a_shipped_experiment_is_named_and_a_missing_one_has_its_line(load, tmp_path):
    shipped = HEAD.replace(str(SMOKE), "smoke") + STEPS + ARMS
    assert load(shipped).runs == load(HEAD + STEPS + ARMS).runs
    missing = complaint(load, HEAD.replace(str(SMOKE), "smok.yaml") + STEPS + ARMS)
    assert missing.startswith(
        f"{tmp_path / 'compare.yaml'}:2: experiment: smok.yaml: no such file; did you mean 'smoke'?"
    )


def test_the_experiment_of_an_extended_comparison_is_found_from_the_file_that_names_it(load, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "base.yaml").write_text(f"extends: {SMOKE}\nname: base\n")
    (shared / "all.yaml").write_text(HEAD.replace(str(SMOKE), "base.yaml") + STEPS + ARMS)
    assert load("extends: shared/all.yaml\nseeds: [7]\n").config.seeds == (7,)


def test_the_command_line_overrides_the_comparison(load):
    comparison = load(HEAD + STEPS + ARMS, "seeds=[5]", "arms.luffy.overrides=[rl.optimizer.lr=3e-4]")
    assert [run.seed for run in comparison.runs] == [5, 5, 5]
    assert [run.config.rl.optimizer.lr for run in comparison.runs_of("luffy")] == [3e-4]


def test_what_is_overridden_for_all_is_every_arms(load):
    comparison = load(HEAD + 'overrides: ["evaluation.max_response_tokens=16"]\n' + STEPS + ARMS)
    assert {run.config.evaluation.max_response_tokens for run in comparison.runs} == {16}


TOKENS = """\
overrides: ["sft.optimizer.schedule={kind: constant}"]
budget: {tokens: 9000, max_optimizer_steps: 21}
"""
BY_TOKENS = ARMS.replace("sft_steps: 4", "sft_tokens: 2000")


def test_a_budget_of_tokens_ends_every_stage_by_its_share(load):
    sft, luffy, both = (run.config for run in load(HEAD.replace("[1, 2]", "[1]") + TOKENS + BY_TOKENS).runs)
    assert (sft.sft.max_tokens, sft.sft.steps) == (9000, 21)
    assert (luffy.rl.max_tokens, luffy.rl.steps) == (9000, 10)  # two updates an RL step
    assert (both.sft.max_tokens, both.rl.max_tokens) == (2000, 7000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TOKENS.replace(", max_optimizer_steps: 21", "") + BY_TOKENS, "max_optimizer_steps: missing"),
        (TOKENS.replace("21", "1") + BY_TOKENS, "max_optimizer_steps 1 is less than the 2 that an RL step makes"),
        (STEPS.replace("12", "12, max_optimizer_steps: 9") + ARMS, "max_optimizer_steps has no effect without tokens"),
        (TOKENS + ARMS, "arms.sft_then_rl: sft_steps: budget.tokens counts tokens; give sft_tokens"),
        (TOKENS + ARMS.replace(", sft_steps: 4", ""), "arms.sft_then_rl: sft_tokens: missing"),
        (TOKENS + BY_TOKENS.replace("2000", "9000"), "sft_tokens 9000 leaves none of budget.tokens 9000 to RL"),
        (STEPS + BY_TOKENS, "sft_tokens has no effect without budget.tokens"),
        (TOKENS + BY_TOKENS.replace("method: sft}", "method: sft, sft_tokens: 9}"), "sft_tokens has no effect"),
        (
            TOKENS
            + BY_TOKENS.replace("method: luffy}", "method: luffy, overrides: [rl.optimizer.schedule.kind=cosine]}"),
            "arms.luffy: rl.optimizer.schedule depends on the number of steps",
        ),
        (
            TOKENS + BY_TOKENS.replace("method: sft}", "method: sft, overrides: [sft.max_tokens=9]}"),
            "change the budget",
        ),
    ],
)
def test_a_budget_of_tokens_refuses_what_it_cannot_keep(load, text, says):
    assert says in complaint(load, HEAD + text)


ROUNDS = """\
arms:
  luffy: {chain: rl, method: luffy}
  rounds: {chain: expert_iteration, method: sft}
  then_rl: {chain: expert_iteration_then_rl, method: on_policy, sft_steps: 6}
"""


def test_every_reported_seed_samples_its_own_answers_in_a_round(load):
    runs = [run for run in load(HEAD + STEPS + ROUNDS).runs if "sample_1" in run.nodes]
    sampled = [CONFIGURE["sample"](run.config) for run in runs]
    assert [settings.seed for settings in sampled] == [run.seed for run in runs] == [1, 1, 2, 2]
    assert {run.config.seed for run in runs} == {7}  # that of the base
    # A seed that is given and one that is not are the same stage.
    assert {settings.sample.seed for settings in sampled} == {None}


def test_the_steps_of_all_rounds_are_the_budget_of_expert_iteration(load):
    luffy, rounds, then_rl = load(HEAD.replace("[1, 2]", "[1]") + STEPS + ROUNDS).runs
    assert rounds.nodes[3:] == ("sample_1", "sft_1", "sample_2", "sft_2", "sample_3", "sft_3", "evaluate_sft_3")
    assert then_rl.nodes[3:] == ("sample_1", "sft_1", "sample_2", "sft_2", "sample_3", "sft_3", "rl", "evaluate_rl")
    assert (luffy.config.rl.steps, rounds.config.sft.steps) == (12 // 2, 12 // 3)
    assert (then_rl.config.sft.steps, then_rl.config.rl.steps) == (6 // 3, (12 - 6) // 2)


@pytest.mark.parametrize(
    ("budget", "arms", "says"),
    [
        (STEPS.replace("12", "10"), ROUNDS, "arms.rounds: 10 optimizer steps of SFT are no multiple of its 3 rounds"),
        (STEPS, ROUNDS.replace("sft_steps: 6", "sft_steps: 4"), "then_rl: 4 optimizer steps of SFT are no multiple"),
        ("budget: {rollouts: 448}\n", ROUNDS, "arms.rounds: how many rollouts the stage sample of chain expert_it"),
        (TOKENS, ROUNDS, "arms.rounds: how many tokens the stage sample of chain expert_iteration takes is known only"),
    ],
)  # fmt: skip
def test_rounds_have_no_budget_that_is_known_only_afterwards(load, budget, arms, says):
    assert says in complaint(load, HEAD + budget + arms)

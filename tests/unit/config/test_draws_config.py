"""What RL draws and how long it learns from it: `rl.stop` and its kin in the configuration and in a stage's key."""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.settings import DifficultySettings, RLSettings, StageSettings
from luffy.errors import ConfigError
from luffy.pipeline.graph import build_graph
from luffy.pipeline.identity import identifying

CONFIGS = Path(__file__).parents[3] / "exp_configs"
SMOKE = CONFIGS / "smoke.yaml"

OLD = (
    "objective.terms=[{name: on_policy, select: on_policy, loss: {kind: clipped_surrogate}, normaliser: {mode: token, "
    "population: joint}}, {name: old, select: on_policy, loss: {kind: kl, estimator: k2, against: old}, normaliser: "
    "{mode: token, population: own}}]"
)
"""Terms that compare with the policy before the step."""


def _settings(kind: type[StageSettings], *overrides: str) -> StageSettings:
    nodes = build_graph(load_experiment(SMOKE, ["chain=rl", "method=luffy", *overrides]))
    return next(node.settings for node in nodes if isinstance(node.settings, kind))


def _complaint(*overrides: str, config: Path = SMOKE) -> str:
    with pytest.raises(ConfigError) as caught:
        load_experiment(config, overrides)
    return str(caught.value)


def test_a_field_that_is_not_used_is_no_part_of_the_key() -> None:
    """The keys of runs from before these fields stay."""
    rl = identifying(_settings(RLSettings))["rl"]
    assert {"seed", "steps", "engine"} <= set(rl) and "stop" not in rl
    assert identifying(_settings(RLSettings, 'rl.stop=["</answer>"]'))["rl"]["stop"] == ["</answer>"]
    assert "guidance" not in identifying(_settings(RLSettings))["objective"]["group"]
    measured = ("difficulty={num_samples: 2}",)
    assert "stop" not in identifying(_settings(DifficultySettings, *measured))["difficulty"]


def test_difficulty_ends_responses_as_rl_does() -> None:
    overrides = ("difficulty={num_samples: 2}", 'rl.stop=["</answer>"]')
    assert _settings(DifficultySettings, *overrides).difficulty.stop == ("</answer>",)
    assert _settings(DifficultySettings, *overrides, "difficulty.stop=[]").difficulty.stop == ()


def test_a_stop_text_is_a_text_and_no_environment_has_a_use_for_it() -> None:
    assert "rl.stop" in _complaint('rl.stop=[""]')
    assert "rl.stop has no effect with an environment" in _complaint(
        'rl.stop=["</answer>"]', config=CONFIGS / "tools.yaml"
    )


def test_the_optimizer_steps_of_every_pass_count() -> None:
    rl = _settings(RLSettings, "rl.prompts_per_step=8", "rl.prompts_per_update=2", "rl.passes=3").rl
    assert (rl.updates_per_pass, rl.updates_per_step) == (4, 12)
    second = ("method=on_policy", "rl.prompts_per_update=null", OLD)
    assert "a kl term against old has no effect" in _complaint("chain=rl", *second)
    assert _settings(RLSettings, *second, "rl.passes=2").rl.updates_per_step == 2


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rl.sampling={kind: pools, hard_at_most: 0.8}", "must be below easy_above"),
        ("rl.sampling={kind: pools, easy_above: 1.5}", "are pass rates, between 0 and 1"),
        ("rl.sampling={kind: pools, shares: {hard: 0, normal: 0, easy: 0}}", "no prompt would be drawn a second time"),
        ("rl.sampling={kind: curriculum}", "rl.sampling.by: is missing"),
        ("rl.sampling={kind: curriculum, by: difficulty}", "add the section difficulty"),
        (
            "objective.group={off_policy: 0, guidance: {pass_rate_at_most: 0.5}}",
            "guidance has no effect with off_policy",
        ),
        ("rl.sampling={kind: pool}", "did you mean 'pools'?"),
    ],
)
def test_sampling_that_cannot_be_meant_is_refused(override: str, says: str) -> None:
    assert says in _complaint("chain=rl", "method=luffy", override)


def test_moving_thresholds_depend_on_the_length_of_the_run() -> None:
    fixed = _settings(RLSettings, "method=on_policy", "rl.optimizer.schedule={kind: constant}")
    moving = "rl.sampling={kind: pools, hard_at_most: {kind: linear, start: 0.1, end: 0.3}}"
    assert fixed.rl.sampling.depends_on_length is False
    assert _settings(RLSettings, moving).depends_on_length

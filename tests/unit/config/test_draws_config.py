"""What RL draws and how long it learns from it: `rl.stop` and its kin in the configuration and in a stage's key."""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.settings import DifficultySettings, RLSettings, StageSettings
from luffy.errors import ConfigError
from luffy.pipeline.chain.graph import build_graph
from luffy.pipeline.chain.identity import identifying

CONFIGS = Path(__file__).parents[3] / "exp_configs"
SMOKE = CONFIGS / "smoke.yaml"


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
    measured = ("difficulty={num_samples: 2}",)
    assert "stop" not in identifying(_settings(DifficultySettings, *measured))["difficulty"]


def test_difficulty_ends_responses_as_rl_does() -> None:
    overrides = ("difficulty={num_samples: 2}", 'rl.stop=["</answer>"]')
    assert _settings(DifficultySettings, *overrides).difficulty.stop == ("</answer>",)
    assert _settings(DifficultySettings, *overrides, "difficulty.stop=[]").difficulty.stop == ()


def test_a_stop_text_is_a_text_and_no_environment_has_a_use_for_it() -> None:
    assert "rl.stop" in _complaint('rl.stop=[""]')
    assert "rl.stop has no use with an environment" in _complaint(
        'rl.stop=["</answer>"]', config=CONFIGS / "tools.yaml"
    )

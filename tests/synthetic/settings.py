"""Settings of stages, as the experiment `smoke` gives them under overrides."""

from pathlib import Path

from luffy.config import load_experiment
from luffy.config.settings import RLSettings
from luffy.pipeline.graph import build_graph

SMOKE = Path(__file__).parents[2] / "exp_configs" / "smoke.yaml"


def rl_settings(*overrides: str) -> RLSettings:
    nodes = build_graph(load_experiment(SMOKE, overrides))
    (settings,) = (node.settings for node in nodes if isinstance(node.settings, RLSettings))
    return settings

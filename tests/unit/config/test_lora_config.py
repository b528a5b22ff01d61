"""`model.lora`: which stages it reaches, and what is refused."""

from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.experiment import ExperimentConfig
from luffy.config.model import LoRAConfig
from luffy.config.settings import BaseSettings, RLSettings, SFTSettings
from luffy.errors import ConfigError
from luffy.pipeline.graph import build_graph

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"
LORA = "model.lora={rank: 4, alpha: 8}"
DROPPED = "model.lora={rank: 4, alpha: 8, dropout: 0.1}"


def load(*overrides: str) -> ExperimentConfig:
    return load_experiment(SMOKE, overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(*overrides)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_sft_and_rl_get_the_adapter_and_base_does_not() -> None:
    settings = {node.name: node.settings for node in build_graph(load(LORA))}
    base, sft, rl = (settings[name] for name in ("base", "sft", "rl"))
    assert isinstance(base, BaseSettings) and isinstance(sft, SFTSettings) and isinstance(rl, RLSettings)
    assert base.model.lora is None
    assert sft.lora == rl.lora == LoRAConfig(rank=4, alpha=8.0)


def test_dropout_is_for_sft_alone() -> None:
    settings = {node.name: node.settings for node in build_graph(load(DROPPED))}
    sft, rl = settings["sft"], settings["rl"]
    assert isinstance(sft, SFTSettings) and isinstance(rl, RLSettings)
    assert sft.lora == LoRAConfig(rank=4, alpha=8.0, dropout=0.1)
    assert rl.lora == LoRAConfig(rank=4, alpha=8.0)
    refused = refusal("chain=rl", "method=luffy", DROPPED)
    assert "model.lora.dropout has no effect without sft" in refused


def test_a_critic_is_refused_beside_an_adapter() -> None:
    ppo = ("chain=rl", "method=ppo", "rl.prompts_per_update=null")
    assert load(*ppo).rl is not None
    assert "model.lora: rl.critic is a second model trained whole" in refusal(*ppo, LORA)


def test_a_model_that_others_serve_has_no_adapter() -> None:
    served = ("model={endpoint: {name: m}, lora: {rank: 4, alpha: 8}, architecture: null}", "base=null")
    assert "lora has no effect on a model served by an endpoint" in refusal(*served)


@pytest.mark.parametrize(
    "wrong",
    ["rank: 0, alpha: 8", "rank: 4, alpha: 0", "rank: 4", "rank: 4, alpha: 8, targets: []",
     "rank: 4, alpha: 8, targets: some", "rank: 4, alpha: 8, dropout: 1.0"],
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(wrong: str) -> None:
    assert "model.lora" in refusal(f"model.lora={{{wrong}}}")


def test_targets_mean_layers_by_the_end_of_their_names() -> None:
    lora = LoRAConfig(rank=4, alpha=8.0, targets=("q_proj", "0.mlp.up_proj"))
    layers = [f"model.layers.{i}.{name}" for i in (0, 10) for name in ("self_attn.q_proj", "mlp.up_proj")]
    assert [lora.adapts(layer) for layer in layers] == [True, True, True, False]
    assert lora.complaint(layers) is None
    assert lora.complaint(layers[1:2]) == (
        "model.lora.targets: q_proj is no linear layer that can be adapted; allowed are up_proj"
    )

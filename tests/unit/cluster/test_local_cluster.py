"""What `rl.engine: vllm` refuses before a model is loaded."""

import importlib.util
from pathlib import Path

import pytest
import torch

from luffy.cluster.local import LocalCluster
from luffy.config import load_experiment
from luffy.config.settings import RLSettings
from luffy.errors import ConfigError
from luffy.pipeline.graph import build_graph
from luffy.training.learner import TrainerSpec

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"


def refusal(folder: Path) -> str:
    config = load_experiment(SMOKE, ["chain=rl", "method=luffy", "rl.engine=vllm"])
    (settings,) = (node.settings for node in build_graph(config) if node.stage == "rl")
    assert isinstance(settings, RLSettings)
    with pytest.raises(ConfigError) as caught:
        LocalCluster(TrainerSpec(settings, config.execution, folder / "no model", folder, longest=112, pad_id=0))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_vllm_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'luffy-rl[vllm]' (docs/gpus.md: vLLM without a GPU)" in refusal(tmp_path)


def test_a_gpu_that_the_trainer_would_have_to_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "set cluster: ray with execution.ray.placement: colocated" in refusal(tmp_path)

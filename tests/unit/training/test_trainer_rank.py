"""One rank of the trainer: what its steps may depend on."""

from pathlib import Path

import torch
from reference.gradient_case import execution, tiny_model, trajectories
from safetensors.torch import load_file

from luffy.config import load_experiment
from luffy.config.settings import RLSettings
from luffy.pipeline.chain.graph import build_graph
from luffy.training.batching import shard_rows
from luffy.training.learner import TrainerSpec
from luffy.training.ranks import init_process_group

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"


def test_an_sft_step_between_rl_steps_has_its_dropout_whatever_was_drawn_before(tmp_path: Path) -> None:
    config = load_experiment(SMOKE, ["chain=rl", "method=relift", "sft.optimizer.lr=1e-2"])
    (settings,) = (node.settings for node in build_graph(config) if isinstance(node.settings, RLSettings))
    model = tiny_model()
    model.config.attention_dropout = 0.5
    model.save_pretrained(tmp_path / "model")
    init_process_group()
    (shard,) = shard_rows(trajectories("sft")[0], 1)
    for drawn in (1, 2):
        rank = TrainerSpec(settings, execution(), tmp_path / "model", tmp_path, longest=32, pad_id=0).open_rank()
        torch.manual_seed(drawn)
        rank.sft_step(shard, 1)
        rank.export(tmp_path / str(drawn))
    one, other, start = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "2", "model"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], start[name]) for name in one)

"""A checkpoint as a plain model folder, from a stage whose workspace is no longer where it was."""

from pathlib import Path

import torch
from reference.lora_case import adapted_policy, base_model, factors
from synthetic.arithmetic import tiny_tokenizer

from luffy.config import load_experiment
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.pipeline.chain.graph import build_graph
from luffy.pipeline.chain.job import JOB_FILE, StageJob, write_job
from luffy.training.checkpoint import CheckpointStore, export_checkpoint
from luffy.training.model_folder import load_causal_lm

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"


def test_a_checkpoint_of_an_adapter_finds_its_base_in_a_workspace_that_was_moved(tmp_path: Path) -> None:
    base, stage = (tmp_path / "workspace" / "stages" / name for name in ("base/0123", "sft/4567"))
    base_model().save_pretrained(base / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    policy = adapted_policy(factors())
    CheckpointStore(stage, 2).save({"policy": policy.engine}, 1, is_extra=False)
    experiment = load_experiment(SMOKE, ["model.lora={rank: 3, alpha: 4.5}"])
    settings = next(node.settings for node in build_graph(experiment) if node.stage == "sft")
    job = StageJob(
        node="sft", stage="sft", key="4567", settings=settings, inputs={"model": str(base)}, upstream={"model": "0123"},
        execution=ExecutionConfig(), tracking=TrackingConfig(),
    )  # fmt: skip
    write_job(stage / JOB_FILE, job)
    moved = (tmp_path / "workspace").rename(tmp_path / "moved") / "stages" / "sft" / "4567"
    (checkpoint,) = (moved / "checkpoints").glob("step_*")
    export_checkpoint(checkpoint, moved, tmp_path / "tokenizer", "float32", tmp_path / "out")
    expected = dict(policy.weights())
    found = load_causal_lm(tmp_path / "out", "float32").state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())

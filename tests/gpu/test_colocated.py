"""One GPU, shared in turn by trainer and engine: real steps of RL in bfloat16, of real shapes, too."""

import subprocess
import sys

import pytest
from reference.gradient_case import ROOT

from luffy.tracking.metrics import read_metrics

IN_TURN = ("model.dtype=bfloat16", "execution.zero_stage=1", "execution.vllm.gpu_memory_utilization=0.3")
SHARED = (
    *IN_TURN,
    "cluster=ray",
    "execution.ray.placement=colocated",
    "execution.ray.trainer_ranks=1",
    "rl.max_staleness=0",
    "rl.correction=null",
)
IN_ONE_PROCESS = ("exp_configs/smoke.yaml", *IN_TURN, "rl.engine=vllm", "evaluation.engine=vllm")
SMALL = "{hidden_size: 128, intermediate_size: 256, num_layers: 2, num_heads: 2, max_position_embeddings: 128}"
SHAPES = {
    "0.5B": "{hidden_size: 896, intermediate_size: 4864, num_layers: 24, num_heads: 14}",
    "1.5B": "{hidden_size: 1536, intermediate_size: 8960, num_layers: 28, num_heads: 12}",
}
MAX_GAP = 0.05
"""Mean distance of the two log-probabilities in nats; kernels in bfloat16 differ by about 0.01."""


def luffy(*arguments: str) -> str:
    """What the command prints, once it has succeeded."""
    command = [sys.executable, "-m", "luffy", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "config",
    [
        ("exp_configs/smoke_ray.yaml", *SHARED),
        ("exp_configs/smoke_ray.yaml", *SHARED, "execution.zero_stage=3"),
        IN_ONE_PROCESS,
    ],
    ids=["ray", "ray, ZeRO 3", "one process"],
)
def test_five_steps_of_training_and_sampling_in_turn(tmp_path, config):
    luffy("run", *config, f"model.architecture={SMALL}", "rl.steps=5", "--workspace", str(tmp_path))
    (log,) = tmp_path.glob("stages/rl/*/log.txt")
    told = log.read_text(encoding="utf-8")
    assert config is IN_ONE_PROCESS or ("weights go by ipc" in told and "by object_store" not in told), told
    (metrics,) = tmp_path.glob("stages/rl/*/metrics.jsonl")
    rows = read_metrics(metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    # After the first step every rollout is of weights that came over while the engine slept.
    assert all(0 < row["rollout/logp_gap_mean"] < MAX_GAP for row in rows), rows
    if config is IN_ONE_PROCESS:  # its engine answers for the evaluations as well
        told = "".join(events.read_text() for events in tmp_path.glob("stages/*/*/events.jsonl"))
        assert (told.count("vLLM engine started"), told.count("vLLM engine kept")) == (1, 3)


@pytest.mark.parametrize("size", SHAPES)
def test_the_steps_of_a_real_shape(tmp_path, size):
    luffy(
        *("run", "exp_configs/smoke_ray.yaml", f"model.architecture={SHAPES[size]}", *SHARED, "rl.steps=3"),
        *("stages=[prepare_data, base, rl]", "execution.gradient_checkpointing=true", "--workspace", str(tmp_path)),
    )
    (metrics,) = tmp_path.glob("stages/rl/*/metrics.jsonl")
    step_s = [row["perf/step_s"] for row in read_metrics(metrics)]
    print(f"{size}: steps of {step_s} s")
    assert len(step_s) == 3

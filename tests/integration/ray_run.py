"""Runs stages of smoke.yaml under Ray: `python ray_run.py WORKSPACE NODES [OVERRIDE ...]`, NODES parted by commas."""

import sys
from collections.abc import Sequence
from pathlib import Path

from toy_run import Recorder

from luffy.config import load_experiment
from luffy.errors import StageFailed
from luffy.pipeline.experiment import ExperimentRun, open_experiment
from luffy.pipeline.supervise import stage_command
from luffy.pipeline.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
# Of vLLM's CPU attention 32 is the smallest head.
OVERRIDES = [
    "chain=rl", "method=luffy", "cluster=ray", "rl.max_staleness=1",
    "model.architecture={hidden_size: 64, intermediate_size: 64, num_layers: 2, num_heads: 2, "
    "max_position_embeddings: 128}",
    "execution.vllm={cpu_kv_cache_gb: 0.1, max_num_seqs: 32}",
]  # fmt: skip


def run_stages(workspace: Path, nodes: Sequence[str], overrides: Sequence[str], recorder: Recorder) -> None:
    """Make the stages; raises StageFailed."""
    config = load_experiment(ROOT / "exp_configs" / "smoke.yaml", [*OVERRIDES, *overrides])
    # Without the code in the keys: an edit between two starts must not make them different stages.
    experiment = open_experiment(config, Workspace(workspace), code=lambda rooms: {})
    run = ExperimentRun(experiment, experiment.workspace.new_run("ray", {}), stage_command)
    for node in nodes:
        run.execute(node, recorder)


def main(workspace: str, nodes: str, *overrides: str) -> int:
    try:
        run_stages(Path(workspace), nodes.split(","), overrides, Recorder(echo=True))
    except StageFailed as failed:
        return failed.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""One GPU, with vLLM in the trainer's process: an adapter beside weights that sleep, and two runs with the same bits.

Never run yet, and no part of `make test-gpu`.
"""

from pathlib import Path

import pytest
from test_colocated import IN_ONE_PROCESS, MAX_GAP, SMALL, luffy

from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import read_metrics, without_times

STEPS = (f"model.architecture={SMALL}", "stages=[prepare_data, base, rl]", "rl.steps=3")
SAME = ("execution.deterministic=true", "execution.vllm.batch_invariant=true")


def ran(workspace: Path, *overrides: str) -> Path:
    """The folder of the RL stage."""
    luffy("run", *IN_ONE_PROCESS, *STEPS, *overrides, "--workspace", str(workspace))
    (stage,) = workspace.glob("stages/rl/*")
    return stage


def test_an_engine_wakes_with_the_adapter_that_is_trained(tmp_path: Path) -> None:
    stage = ran(tmp_path, "model.lora={rank: 8, alpha: 16}", "rl.optimizer={lr: 0.01}")
    rows = read_metrics(stage / "metrics.jsonl")
    assert all(0 < row["rollout/logp_gap_mean"] < MAX_GAP for row in rows), rows


@pytest.mark.parametrize("adapter", [(), ("model.lora={rank: 8, alpha: 16}",)], ids=["all weights", "adapter"])
def test_two_runs_sample_and_learn_the_same_bits(tmp_path: Path, adapter: tuple[str, ...]) -> None:
    one, other = (ran(tmp_path / name, *SAME, *adapter) for name in ("one", "other"))
    for step in (1, 2, 3):
        assert RolloutJournal(one / "journal").read(step) == RolloutJournal(other / "journal").read(step)
    found, again = ([without_times(row) for row in read_metrics(stage / "metrics.jsonl")] for stage in (one, other))
    assert found == again

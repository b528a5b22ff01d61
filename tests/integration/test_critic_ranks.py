"""The critic over two ranks: any split and ZeRO stage against the float64 reference."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_two_ranks_give_the_reference_gradient_and_step_of_the_critic(zero_stage: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = str(ROOT / "tests/distributed/critic_worker.py")
    done = subprocess.run(
        [*command, worker, json.dumps({"zero_stage": zero_stage})],
        capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    cases = json.loads(line.removeprefix("RESULT "))
    assert len(cases) == 3
    for case, errors in cases.items():
        assert max(errors.values()) < 1e-5, (case, errors)

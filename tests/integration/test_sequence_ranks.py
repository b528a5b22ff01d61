"""Four ranks as two shards of two slices, or one shard of four: what they learn is what the references learn."""

import json
import subprocess
import sys

import pytest
from patience import PATIENCE_S
from reference.gradient_case import ROOT


@pytest.mark.slow
def test_ranks_that_share_sequences_learn_what_the_references_learn() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    worker = str(ROOT / "tests/distributed/sequence_worker.py")
    done = subprocess.run([*command, worker], capture_output=True, text=True, timeout=PATIENCE_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    assert len(found["errors"]) == 6
    for case, error in found["errors"].items():
        # The learner is compared by its movement, which is small beside the parameters.
        assert error < (3e-3 if case.startswith("learner") else 1e-5), (case, error)
    # Each rank alone would see a difference in its own slice only.
    refusal = "execution.sequence_parallel: the layers of FalconH1ForCausalLM need whole sequences; use 1"
    assert found["refusals"] == [refusal] * 4

"""`kill -9` at chosen writes of an SFT stage: a small, seeded selection of `tests/campaigns/placed_kills.py`."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the counting library is built with gcc"),
]
CAMPAIGN = Path(__file__).parents[1] / "campaigns" / "placed_kills.py"


def test_kills_at_the_writes_of_sft_lose_nothing_and_repeat_no_finished_step(tmp_path):
    table = tmp_path / "kills.csv"
    chosen = ["--only", "sft", "--per-stage", "30", "--sample", "4", "--seed", "3", "--csv", str(table)]
    result = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--workspace", str(tmp_path / "workspace"), *chosen],
        cwd=CAMPAIGN.parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(list(csv.DictReader(table.open()))) == 4

"""`kill -9` at chosen writes of stages, and a disk that is full there: a seeded selection of the placed kills."""

import csv
import shutil
import sys
from pathlib import Path

import pytest
from support.patience import ran

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc libc6-dev"),
]
CAMPAIGN = Path(__file__).parents[1] / "campaigns" / "placed_kills.py"


def trials_of(workspace, *chosen):
    """What the campaign finds at a few faults, which a seed draws; their preparation is kept in `workspace`."""
    table = workspace / f"{len(list(workspace.glob('*.csv')))}.csv"
    command = [sys.executable, CAMPAIGN, "--workspace", workspace, "--csv", table, "--seed", "3", *chosen]
    result = ran(command, cwd=CAMPAIGN.parents[2])
    assert result.returncode == 0, result.stdout + result.stderr
    return list(csv.DictReader(table.open()))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return tmp_path_factory.mktemp("placed")


def test_kills_at_the_writes_of_stages_lose_nothing_and_repeat_no_finished_step(workspace):
    stages = ["--only", "prepare_data", "--only", "sft", "--only", "damaged"]
    assert len(trials_of(workspace, *stages, "--per-stage", "30", "--sample", "6")) == 6


def test_a_disk_that_is_full_at_any_write_is_one_line_and_the_stage_resumes(workspace):
    trials = trials_of(workspace, "--only", "sft", "--full", "--per-stage", "30", "--sample", "3")
    assert [trial["moment"] for trial in trials] == ["full"] * 3

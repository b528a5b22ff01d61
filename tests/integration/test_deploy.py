"""The scripts of deploy/, with stand-ins for what is not here."""

import os
import subprocess
from pathlib import Path

import pytest
from support.patience import PATIENCE_S, wait_until

SLURM = Path(__file__).parents[2] / "deploy" / "slurm.sh"
RUN = """#!/usr/bin/env bash
asked=0
trap 'asked=$((asked + 1)); touch "$SEEN/asked$asked"' TERM
echo "$@" > "$SEEN/started"
[ "$CODE" ] && exit "$CODE"
while [ ! -e "$SEEN/saved" ]; do read -r -t 0.02 _ < "$SEEN/never"; done
exit 75
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" > "$SEEN/requeued"
"""


@pytest.fixture
def job(tmp_path):
    """Starts the script as Slurm does; the stand-in for the run ends with a code, or once `saved` is there."""
    os.mkfifo(tmp_path / "never")
    keeps_open = os.open(tmp_path / "never", os.O_RDWR)
    for name, text in (("luffy", RUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"

    def start(code):
        env = {**os.environ, "PATH": path, "SEEN": str(tmp_path), "CODE": code, "SLURM_JOB_ID": "17"}
        return subprocess.Popen([str(SLURM), "smoke", "rl.steps=8"], env=env)

    yield start
    os.close(keeps_open)


def test_a_job_that_is_asked_to_end_twice_passes_it_on_waits_for_its_run_and_goes_back_into_the_queue(job, tmp_path):
    process = job("")
    wait_until((tmp_path / "started").exists)
    for asked in ("asked1", "asked2"):
        process.terminate()
        wait_until((tmp_path / asked).exists)
    (tmp_path / "saved").touch()
    assert process.wait(PATIENCE_S) == 75
    assert (tmp_path / "started").read_text() == "run smoke rl.steps=8\n"
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize("code", ["0", "2"])
def test_a_finished_or_failed_run_is_not_started_again(job, tmp_path, code):
    assert job(code).wait(PATIENCE_S) == int(code)
    assert not (tmp_path / "requeued").exists()

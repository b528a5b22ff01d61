import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

TESTS = Path(__file__).parents[2]
FAILING = """
def test_right(): ...

def test_wrong():
    assert 1 == 2, "one\\ntwo"

def test_later():
    import os
    os._exit(3)
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_failed_test_is_named_before_the_run_ends(tmp_path, workers):
    (tmp_path / "test_failing.py").write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-p", "failed_tests", *workers, "--rootdir", tmp_path, "test_failing.py"]
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    before = done.stdout.partition("= FAILURES =")[0]
    assert "test_failing.py::test_wrong failed (call, 0 s): AssertionError: one\n" in before, done.stdout

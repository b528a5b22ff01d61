import ast
import os
import sys
from pathlib import Path

from support.patience import ran

TESTS = Path(__file__).parents[2]
SKIPPING = """
import pytest

needs_data = pytest.mark.skipif(True, reason="needs data: make data")

@needs_data
def test_one(): ...

@pytest.mark.parametrize("_", range(2))
@pytest.mark.skipif(True, reason="needs data: make data")
def test_two(_): ...

@pytest.mark.parametrize("text", ["a b", "[c]"])
def test_three(text):
    if text == "[c]":
        pytest.importorskip("no_such_package", reason="needs the package no-such-package")

def test_four(): ...
"""


def test_a_run_ends_with_what_its_skipped_tests_needed(tmp_path):
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-p", "support.summary", "-q", "--rootdir", tmp_path]
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(TESTS)}}
    done = ran([*command, "--skipped-to", "skipped.txt", "test_skipping.py"], **where)
    assert "\nskipped: 3 needs data (make data); 1 needs the package no-such-package\n" in done.stdout
    again = ran([*command, "--as-slow", "skipped.txt", "-m", "slow"], **where)
    assert "4 skipped" in again.stdout and "passed" not in again.stdout, again.stdout


def test_every_skip_says_what_it_needs():
    reasons = {}
    for path in sorted(TESTS.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith(
                ("pytest.skip", ".skipif", "orskip")
            ):
                continue
            said = next((each.value for each in call.keywords if each.arg == "reason"), None)
            if ast.unparse(call.func).endswith("pytest.skip"):
                said = call.args[0]
            reasons[f"{path.name}:{call.lineno}"] = "" if said is None else ast.unparse(said).lstrip("f\"'")
    assert len(reasons) > 30
    computed = ("str(error)", "_namespaces")  # what they hold begins so, too, or is torch's own
    assert not {place: said for place, said in reasons.items() if not said.startswith(("needs ", *computed))}

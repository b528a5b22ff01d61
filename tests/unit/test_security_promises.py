"""Every promise of SECURITY.md names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_exists(file, name):
    body = ast.parse((ROOT / file).read_text()).body
    assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_a_test():
    table = TEXT.split("## Promises")[1].split("\n## ")[0]
    promises = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(promises) >= 15 and all("::test_" in promise for promise in promises)

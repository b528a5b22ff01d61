"""Files and tests of this repository that the documentation names are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("exp_configs/*.md")])
FOLDERS = "data|deploy|docs|exp_configs|flows|luffy|tasks|tests"
NAMED = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]+\.(?:py|yaml|sh|md)\b")
OLD = {ROOT / "CHANGELOG.md"}
"""Names files as they were at the time."""


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OLD], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page):
    named = set(NAMED.findall(page.read_text()))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_the_pages_name_many():
    assert sum(len(NAMED.findall(page.read_text())) for page in PAGES) > 200


SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("file", "name"), re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SECURITY))
def test_a_test_that_a_promise_names_exists(file, name):
    body = ast.parse((ROOT / file).read_text()).body
    assert name in {node.name for node in body if isinstance(node, ast.FunctionDef)}


def test_every_promise_names_a_test():
    table = SECURITY.split("## Promises")[1].split("\n## ")[0]
    promises = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(promises) >= 15 and all("::test_" in promise for promise in promises)

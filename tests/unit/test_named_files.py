"""Files of this repository that the documentation names are there."""

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

"""Parses a tool's docstring: the description, and one text for each parameter of a Google-style `Args:` section."""

import inspect
import re
from collections.abc import Iterator, Mapping

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Note|Notes|Example|Examples):\s*$", re.M)
_PARAMETERS = ("Args", "Arguments", "Parameters")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\([^()]*\))?:\s*(.*)")


def described(docstring: str) -> tuple[str, Mapping[str, str]]:
    """Return the first paragraph as one line, "" without any, and the parameters' descriptions by name."""
    text = inspect.cleandoc(docstring)
    pieces = _SECTION.split(text)
    first = pieces[0].strip().split("\n\n")[0]
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    entries = {name: text for section in _PARAMETERS for name, text in _entries(sections.get(section, ""))}
    return " ".join(first.split()), entries


def _entries(section: str) -> Iterator[tuple[str, str]]:
    """The entries of a section: an indented `name: text` each, continued by lines that are indented further."""
    lines = [line for line in section.splitlines() if line.strip()]
    margin = _indent(lines[0]) if lines else 0
    name, words = "", ""
    for line in lines:
        if _indent(line) < margin:
            break  # text after the section
        entry = _ENTRY.match(line.strip()) if _indent(line) == margin else None
        if entry is None:
            words = f"{words} {line.strip()}"
            continue
        if name:
            yield name, words.strip()
        name, words = entry.groups()
    if name:
        yield name, words.strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())

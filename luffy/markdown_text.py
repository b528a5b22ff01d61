"""Text of data and models inside Markdown that a browser shows (Prefect's artifacts, `summary.md`): never markup."""

import re

_MARKUP = re.compile(r"[|<\\]|(?<=\])[(\[:]")  # a link is [text](address), [text][name] or [name]: address
_ADDRESS = re.compile(r"(?<=[A-Za-z])(:(?=//)|(?<=www)\.)", re.IGNORECASE)
"""What makes a viewer turn a bare address into a link."""


def markdown_cell(text: str) -> str:
    """Text for a cell of a table or a line of its own: no HTML, image or link begins in it, and no cell ends."""
    return _ADDRESS.sub(r"\\\1", _MARKUP.sub(lambda found: f"\\{found[0]}", " ".join(text.split())))

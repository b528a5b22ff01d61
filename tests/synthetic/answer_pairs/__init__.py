r"""Labelled pairs of a reference and an answer, by class, in the manner of competition mathematics.

Two lists: `built_for` is what the rules of `luffy.grading` were built with, `held_out` was written before them and not
read while they were built. A line is `+` (right) or `-` (wrong), the reference, `~~`, the answer; `#` opens a class.
Control characters are written as their pictures (U+2409 for a tab).
"""

from pathlib import Path
from typing import NamedTuple

BUILT_FOR, HELD_OUT = "built_for", "held_out"
_CONTROLS = {0x2400 + code: chr(code) for code in range(32)}


class AnswerPair(NamedTuple):
    """A reference, an answer, and whether people take the answer for right."""

    subject: str
    gold: str
    answer: str
    right: bool


def answer_pairs(name: str) -> list[AnswerPair]:
    """The pairs of one list, in order."""
    pairs, subject = [], ""
    for line in Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            subject = line[2:]
        elif line:
            gold, answer = line[2:].translate(_CONTROLS).split(" ~~ ")
            pairs.append(AnswerPair(subject, gold, answer, line[0] == "+"))
    return pairs

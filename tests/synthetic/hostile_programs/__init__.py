"""Some 270 programs that a policy might hand in to break its grader, each with how it has to end.

None of them solves the problem (print 3), though some know the answer. In the list, `#` opens a group with its end: an
outcome, then what its reason says; several where it depends on the kernel. A line is a program as JSON text.
"""

import json
from pathlib import Path
from typing import NamedTuple

RAISED, TIME = "wrong: raised", "timed_out: timed_out"
OUTPUT = "crashed: output_limit"


class HostileProgram(NamedTuple):
    """A program and how it ends."""

    text: str
    ends: tuple[str, ...]


_INDENTED = "if True:\n" + "".join(" " * depth + "if True:\n" for depth in range(1, 300))
_LONG = ["(" * 100000, "x = " + "-" * 100000 + "1"]
PROGRAMS = [HostileProgram(_INDENTED, (RAISED,)), *(HostileProgram(text, (OUTPUT, RAISED)) for text in _LONG)]
for _line in (Path(__file__).parent / "programs.txt").read_text(encoding="utf-8").splitlines():
    if _line.startswith("# "):
        _ends = tuple(_line[2:].split(" | "))
    else:
        PROGRAMS.append(HostileProgram(json.loads(_line), _ends))

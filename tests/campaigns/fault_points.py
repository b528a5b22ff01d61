"""Faults at the n-th call of a kind that changes files: `fault_shim.c`, its control block, and where faults are placed.

shim = load_shim(folder, root)        # starts this program again with the shim, the first time
shim.watch(None)                      # in a process that leads a group: its calls are counted from now on
shim.counts()                         # {"open": 12, "write": 40, ...}
"""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Call = Literal["open", "write", "fsync", "rename", "unlink", "mkdir", "link", "truncate"]
Moment = Literal["before", "after", "half", "full"]
CALLS: tuple[Call, ...] = get_args(Call)
MOMENTS: tuple[Moment, ...] = get_args(Moment)
_KILLS: tuple[Moment, ...] = ("before", "after")
_TAKES_SPACE: tuple[Call, ...] = ("open", "write", "mkdir", "link")
_CONTROL, _ROOT = "PLACED_KILLS_CONTROL", "PLACED_KILLS_ROOT"
_SOURCE = Path(__file__).with_name("fault_shim.c")


@dataclass(frozen=True, slots=True)
class Fault:
    """SIGKILL to the process group before or after a call, or within a write; or a disk that is full from there on."""

    call: Call
    number: int
    """The how manieth of its kind, from 1."""
    moment: Moment


class _Block(ctypes.Structure):
    _fields_ = (
        ("group", ctypes.c_uint64),
        ("kind", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("moment", ctypes.c_uint64),
        ("fired", ctypes.c_uint64),
        ("counts", ctypes.c_uint64 * len(CALLS)),
    )


class Shim:
    """The control block, which this process shares with all that carry the shim."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Block))
        self._block = _Block.from_buffer(self._map)

    def arm(self, fault: Fault | None) -> None:
        """Set the counts to 0 and the fault for the next process that is watched; None: it is only counted."""
        ctypes.memset(ctypes.addressof(self._block), 0, ctypes.sizeof(_Block))
        if fault is not None:
            self._block.number, self._block.moment = fault.number, MOMENTS.index(fault.moment)
            self._block.kind = 1 + CALLS.index(fault.call)

    def watch(self) -> None:
        """Watch the process group of this process."""
        self._block.group = os.getpgrp()

    def disarm(self) -> None:
        """Watch nobody."""
        self._block.group = 0

    @property
    def has_fired(self) -> bool:
        return bool(self._block.fired)

    def counts(self) -> dict[Call, int]:
        """Calls so far, by kind."""
        return dict(zip(CALLS, map(int, self._block.counts), strict=True))


def load_shim(folder: Path, root: Path) -> Shim:
    """The shim for files below `root`; builds it in `folder` and starts this program again where it is not loaded."""
    control, library = folder / "control", folder / "fault_shim.so"
    if os.environ.get(_ROOT) != str(root):
        folder.mkdir(parents=True, exist_ok=True)
        control.write_bytes(bytes(mmap.PAGESIZE))
        build = ["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-o", str(library), str(_SOURCE), "-ldl"]
        subprocess.run(build, check=True)
        loaded = {"LD_PRELOAD": str(library), _CONTROL: str(control), _ROOT: str(root)}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **loaded})
    return Shim(control)


def place_faults(counts: Mapping[Call, int], number: int, *, full: bool = False) -> list[Fault]:
    """About `number` faults: as many of each kind of call, evenly over a run; before, after and within in turn.

    `full`: the disk fills up at calls that take space, instead of kills.
    """
    waiting = {call: count for call, count in counts.items() if count and (call in _TAKES_SPACE or not full)}
    found: list[Fault] = []
    left = number
    # Kinds with few calls first: what they cannot take goes to the others.
    for index, (call, count) in enumerate(sorted(waiting.items(), key=lambda item: item[1])):
        share = max(1, left // (len(waiting) - index))
        moments: tuple[Moment, ...] = ("full",) if full else (*_KILLS, "half") if call == "write" else _KILLS
        spots = [(place, moment) for place in range(1, count + 1) for moment in moments]
        chosen = min(share, len(spots))
        # A stride that is no multiple of the number of moments would favour one; the turn decides instead.
        for turn in range(chosen):
            place = 1 + (turn * count + count // 2) // chosen if count > 1 else 1
            # Each kind begins with another moment: else few faults would all be before their calls.
            found.append(Fault(call, min(place, count), moments[(turn + index) % len(moments)]))
        left -= chosen
    return list(dict.fromkeys(found))

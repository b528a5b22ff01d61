"""When a process started, in a form that a change of the clock does not move: the boot, and ticks since it (Linux)."""

from pathlib import Path

_PROC = Path("/proc")
_START_FIELD = 19
"""Index of `starttime` among the fields of /proc/PID/stat after the command's name; see proc(5)."""


def process_start(pid: int) -> str:
    """`<boot id>:<ticks>` of the process, unique among those that have had its number; empty if it cannot be read."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return ""
    # The name is in parentheses and may itself hold spaces and parentheses.
    return f"{boot}:{stat.rpartition(b')')[2].split()[_START_FIELD].decode('ascii')}"

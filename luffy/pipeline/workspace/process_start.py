"""Identifies a process beyond its pid (Linux): its machine, its PID namespace there, and when it started.

Start times are the boot id and ticks since boot, which do not change when the clock is set.
"""

import hashlib
import hmac
from pathlib import Path

_PROC = Path("/proc")
_MACHINE_ID = Path("/etc/machine-id")
_START_FIELD = 19
"""Index of `starttime` among the fields of /proc/PID/stat after the command's name; see proc(5)."""


def process_start(pid: int) -> str:
    """`<boot id>:<ticks>` of the process, unique among those that have had its number; empty if it cannot be read."""
    try:
        boot = _boot_id()
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return ""
    # The name is in parentheses and may itself hold spaces and parentheses.
    return f"{boot}:{stat.rpartition(b')')[2].split()[_START_FIELD].decode('ascii')}"


def boot_id() -> str:
    """Unique to this boot of this machine, and the same in all its containers; empty if it cannot be read."""
    try:
        return _boot_id()
    except OSError:
        return ""


def _boot_id() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pid_namespace() -> str:
    """`<boot id>:<inode>` of the PID namespace of this process, e.g. of its container; empty if it cannot be read.

    Unique among the namespaces that exist on a machine at one time; a later one may get the inode of an ended one.
    """
    try:
        boot = _boot_id()
        return f"{boot}:{(_PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def machine() -> str:
    """A name of this machine that outlives a reboot; empty without /etc/machine-id, as in many container images.

    A digest, since machine-id(5) asks programs not to pass the id itself on.
    """
    try:
        found = _MACHINE_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return hmac.digest(found.encode(), b"luffy", hashlib.sha256).hex()[:16] if found else ""


def is_other_machine(name: str) -> bool:
    """Whether `name` is that of another machine; False where either is unknown."""
    own = machine()
    return bool(own) and bool(name) and name != own


def is_other_container(namespace: str) -> bool:
    """Whether `namespace` is another PID namespace of this machine's present boot, whose processes may be invisible.

    False where either is unknown, and after another boot: its processes have ended.
    """
    own = pid_namespace()
    return bool(own) and namespace != own and namespace.partition(":")[0] == own.partition(":")[0]

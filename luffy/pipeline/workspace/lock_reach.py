"""Which machines see the locks of a file system: all that share it, only the one that takes them, or none."""

import fcntl
import os
import re
import tempfile
from pathlib import Path

from luffy.errors import WorkspaceError

_MOUNTS = Path("/proc/self/mounts")
_NFS = ("nolock", "local_lock=all", "local_lock=flock")
_LOCAL_OPTIONS = {
    "nfs": _NFS,
    "nfs4": _NFS,
    "lustre": ("localflock",),
    "ocfs2": ("localflocks",),
    "cifs": ("nobrl",),
    "smb3": ("nobrl",),
}
"""Mount options with which the kernel keeps locks to itself: nfs(5), mount.lustre(8), mount.ocfs2(8), mount.cifs(8)."""
_ALWAYS_LOCAL = ("fuse.sshfs",)
_SHARED_BY_DEFAULT = (*_LOCAL_OPTIONS, "ceph", "gfs2", "gpfs")
"""File systems whose locks all machines see, unless mounted with an option above."""
_OF_ONE_MACHINE = (
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "tmpfs", "ramfs", "overlay"),
    *("fuse.fuse-overlayfs", "fuseblk", "vfat", "exfat", "ntfs3", "squashfs", "erofs"),
)
LOCAL_LOCKS_REMEDY = (
    "mount it with locks that all machines see. Until then, run luffy serve on one machine only, and luffy gc only "
    "while no machine starts runs. A lease keeps machines out of each other's stages, and that of a lost machine "
    "expires after 90 s"
)
"""Advice for a workspace whose locks other machines do not see, or may not."""


def check_locks(folder: Path) -> None:
    """Raise WorkspaceError unless `flock` keeps a second process of this machine out, as on most file systems."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
        fault = _fault(probe.name)
    if fault is not None:
        raise WorkspaceError(
            f"workspace {folder}: its file system has no working file locks (flock: {fault}), so two runs could write "
            "one result; mount it with locks, or give another with --workspace"
        )


def ends_at_machine(folder: Path, mounts: Path = _MOUNTS) -> str | None:
    """The mount (`nfs4 with local_lock=all`) whose locks other machines do not see; None where there is none.

    Only what mount options say is known.
    """
    kind, options = _mount_of(folder.resolve(), mounts)
    if kind in _ALWAYS_LOCAL:
        return kind
    found = [option for option in _LOCAL_OPTIONS.get(kind, ()) if option in options]
    return f"{kind} with {found[0]}" if found else None


def is_of_one_machine(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether only this machine can write there, by the kind of its file system."""
    return _mount_of(folder.resolve(), mounts)[0] in _OF_ONE_MACHINE


def of_unknown_reach(folder: Path, mounts: Path = _MOUNTS) -> str | None:
    """The kind of the file system (`fuse.s3fs`, `beegfs`) if nothing is known about its locks, else None."""
    kind, _ = _mount_of(folder.resolve(), mounts)
    return None if kind in (*_OF_ONE_MACHINE, *_SHARED_BY_DEFAULT, *_ALWAYS_LOCAL) else kind


def lock_note(folder: Path) -> str | None:
    """A note for users who start a run where other machines do not see the locks; None elsewhere."""
    mount = ends_at_machine(folder)
    return (
        None
        if mount is None
        else f"workspace {folder}: other machines do not see its locks ({mount}); {LOCAL_LOCKS_REMEDY}"
    )


def _fault(path: str) -> str | None:
    first, second = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        return error.strerror
    finally:
        os.close(first)
        os.close(second)
    return "a second holder is not kept out"


def _mount_of(folder: Path, mounts: Path) -> tuple[str, list[str]]:
    """Kind and options of the file system; the last of several mounts at one point covers the others."""
    best, found = -1, ("", list[str]())
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, options, *_ = line.split(" ")
        # Spaces and the like are written in octal: proc_pid_mounts(5), getmntent(3).
        where = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point))
        if folder.is_relative_to(where) and len(where.parts) >= best:
            best, found = len(where.parts), (kind, options.split(","))
    return found

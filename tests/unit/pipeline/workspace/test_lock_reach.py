"""A workspace without working locks is refused; one whose locks end at the machine is recognised by its mount."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from luffy.pipeline.workspace.lock_reach import ends_at_machine, is_of_one_machine, lock_note, of_unknown_reach

FLOCK = """
#include <errno.h>
#include <stdlib.h>
int flock(int descriptor, int operation) { errno = atoi(getenv("FLOCK_ERRNO")); return errno ? -1 : 0; }
"""
PREPARE = """
import os, sys
from pathlib import Path
from luffy.errors import WorkspaceError
from luffy.pipeline.workspace import Workspace
for number in sys.argv[2:]:
    os.environ["FLOCK_ERRNO"] = number
    try:
        Workspace(Path(sys.argv[1])).prepare()
    except WorkspaceError as error:
        print(error)
"""
REASONS = {
    errno.ENOLCK: "No locks available",
    errno.EOPNOTSUPP: "Operation not supported",
    0: "a second holder is not kept out",
}
MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
filer:/lab /lab nfs4 rw,vers=4.2,local_lock=none 0 0
filer:/old /lab/old nfs rw,vers=3,nolock,local_lock=all 0 0
filer:/a\\040b /lab/a\\040b nfs rw,vers=3,local_lock=flock 0 0
me@host:/ /mnt/ssh fuse.sshfs rw,user_id=0 0 0
tmpfs /lab/old/tmp tmpfs rw 0 0
bucket /mnt/bucket fuse.s3fs rw 0 0
"""


def built(folder):
    """A library in which `flock` fails with the number FLOCK_ERRNO, or succeeds always, as on some network mounts."""
    source = folder / "flock.c"
    source.write_text(FLOCK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", source.with_suffix(".so"), source], check=True)
    return source.with_suffix(".so")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc: apt-get install gcc libc6-dev")
def test_a_workspace_without_working_locks_is_refused_in_one_line(tmp_path):
    environment = {"LD_PRELOAD": str(built(tmp_path)), "FLOCK_ERRNO": "0", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", PREPARE, tmp_path / "lab", *map(str, REASONS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, reason in zip(done.stdout.splitlines(), REASONS.values(), strict=True):
        assert f"{tmp_path}/lab: its file system has no working file locks (flock: {reason})" in line


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/lab/workspace", None),
        ("/lab/old/workspace", "nfs with nolock"),
        ("/lab/old/tmp/workspace", None),
        ("/lab/a b", "nfs with local_lock=flock"),
        ("/mnt/ssh/workspace", "fuse.sshfs"),
        ("/laboratory", None),
    ],
)
def test_a_mount_tells_whether_its_locks_end_at_the_machine(tmp_path, folder, expected):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert ends_at_machine(Path(folder), mounts) == expected


@pytest.mark.parametrize(
    ("folder", "alone", "unknown"),
    [
        ("/work", True, None),
        ("/lab/old/tmp", True, None),
        ("/lab", False, None),
        ("/lab/old", False, None),
        ("/mnt/ssh", False, None),
        ("/mnt/bucket", False, "fuse.s3fs"),
    ],
)
def test_a_lease_is_held_wherever_other_machines_may_write(tmp_path, folder, alone, unknown):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert is_of_one_machine(Path(folder), mounts) is alone
    assert of_unknown_reach(Path(folder), mounts) == unknown


def test_a_disk_of_this_machine_needs_no_note(tmp_path):
    assert lock_note(tmp_path) is None

"""The system calls that a sandbox refuses, as a seccomp program (`man 2 seccomp`) for `bwrap --seccomp`.

It keeps the session at one process, so that limits of a process are limits of the session, and it takes away what
namespaces and limits of resources leave open: memory that no limit counts, and parts of the kernel that Python never
needs and exploits often do.
"""

import errno
import platform
import socket
import struct
from typing import NamedTuple

from luffy.errors import UserError

_LAST_CALL = 441
"""`epoll_pwait2`. Newer system calls do not exist in a sandbox; C libraries do without them."""
_CLONE_THREAD = 0x00010000

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`; the first argument's low half, since both machines are little-endian."""
ALLOW, KILL = 0x7FFF0000, 0x80000000
_ERROR = 0x00050000


class Machine(NamedTuple):
    """The numbers that differ between processor architectures."""

    audit_architecture: int
    column: int
    """Column of the numbers in the tables below."""


MACHINES = {"x86_64": Machine(0xC000003E, 0), "aarch64": Machine(0xC00000B7, 1)}

_NEW_PROCESS = {"fork": (57, None), "vfork": (58, None)}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = {"socket": (41, 198), "socketpair": (53, 199)}
_PRCTL = (157, 167)
_PR_SET_PDEATHSIG = 1
_MODES = {"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53)}
"""They succeed without effect. `/dev/null` is the host's and belongs to the superuser: a sandbox that the superuser
opened could lock everybody out of it."""


def _numbers(table: str) -> dict[str, tuple[int | None, int | None]]:
    """Rows of `name number number;`, where `-` stands for a call that does not exist."""
    rows = (row.split() for row in table.rstrip("; ").split(";"))
    return {name: (None if x86 == "-" else int(x86), None if arm == "-" else int(arm)) for name, x86, arm in rows}


REFUSED = _numbers(
    # Namespaces and mounts.
    "unshare 272 97; setns 308 268; mount 165 40; umount2 166 39; pivot_root 155 41; chroot 161 51; "
    "open_tree 428 428; move_mount 429 429; fsopen 430 430; fsconfig 431 431; fsmount 432 432; fspick 433 433; "
    "swapon 167 224; swapoff 168 225; "
    # Other processes.
    "ptrace 101 117; process_vm_readv 310 270; process_vm_writev 311 271; pidfd_getfd 438 438; "
    "process_madvise 440 440; kcmp 312 272; "
    # Memory that no limit of the process counts, and quotas that all processes of the machine share. With setsockopt, a
    # socket's buffers would be as large as the machine is tuned for.
    "memfd_create 319 279; shmget 29 194; shmat 30 196; shmctl 31 195; semget 64 190; msgget 68 186; mq_open 240 180; "
    "setxattr 188 5; lsetxattr 189 6; fsetxattr 190 7; setsockopt 54 208; inotify_init 253 -; inotify_init1 294 26; "
    "fanotify_init 300 262; io_setup 206 0; add_key 248 217; request_key 249 218; keyctl 250 219; "
    # Large parts of the kernel that Python does not need.
    "bpf 321 280; perf_event_open 298 241; userfaultfd 323 282; io_uring_setup 425 425; io_uring_enter 426 426; "
    "io_uring_register 427 427; vmsplice 278 75; personality 135 92; modify_ldt 154 -; name_to_handle_at 303 264; "
    "open_by_handle_at 304 265; mbind 237 235; set_mempolicy 238 237; migrate_pages 256 238; move_pages 279 239; "
    "remap_file_pages 216 234; quotactl 179 60; lookup_dcookie 212 18; nfsservctl 180 42; uselib 134 -; ustat 136 -; "
    "sysfs 139 -; _sysctl 156 -; "
    # The machine itself.
    "sync 162 81; syncfs 306 267; syslog 103 116; acct 163 89; reboot 169 142; kexec_load 246 104; "
    "kexec_file_load 320 294; init_module 175 105; finit_module 313 273; delete_module 176 106; iopl 172 -; "
    "ioperm 173 -; settimeofday 164 170; clock_settime 227 112; clock_adjtime 305 266; adjtimex 159 171; "
    "sethostname 170 161; setdomainname 171 162; vhangup 153 58; "
)
"""Numbers on x86_64 and aarch64 (Linux 6.1, `asm/unistd_64.h` and `asm-generic/unistd.h`); None: does not exist."""


def filter_program(max_threads: int, machine_name: str | None = None) -> bytes:
    """The program as an array of `struct sock_filter`; UserError on a processor whose numbers are not known.

    `machine_name` None: this machine's.
    """
    name = machine_name or platform.machine()
    if name not in MACHINES:
        raise UserError(
            f"sandbox: kind: bubblewrap supports {' and '.join(MACHINES)}, and this machine is "
            f"{name}; run it on one of those"
        )
    machine = MACHINES[name]
    return b"".join(
        (
            _load(_ARCHITECTURE),
            _jump(_EQUAL, machine.audit_architecture, if_true=1, if_false=0),
            _return(KILL),  # the calls of another architecture have other numbers
            _load(_NUMBER),
            _jump(_GREATER, _LAST_CALL, if_true=0, if_false=1),
            _return(_ERROR | errno.ENOSYS),
            _refusal(_CLONE3[machine.column], errno.ENOSYS),  # its flags are in memory; libraries fall back to clone
            *(_refusal(numbers[machine.column], errno.EPERM) for numbers in (_NEW_PROCESS | REFUSED).values()),
            *(_refusal(numbers[machine.column], 0) for numbers in _MODES.values()),
            # Sockets of the family that stays in the sandbox; any other network is unreachable.
            *(
                _check_argument(numbers[machine.column], _EQUAL, socket.AF_UNIX, allows=True, error=errno.ENETUNREACH)
                for numbers in _SOCKET.values()
            ),
            # Any `prctl` but the one that lets a process outlive its parent: a killed stage would leave it behind.
            _check_argument(_PRCTL[machine.column], _EQUAL, _PR_SET_PDEATHSIG, allows=False, error=errno.EPERM),
            _check_argument(_CLONE[machine.column], _ANY_BIT, _CLONE_THREAD, allows=True, error=errno.EPERM)
            if max_threads > 1
            else _refusal(_CLONE[machine.column], errno.EPERM),
            _return(ALLOW),
        )
    )


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, offset)


def _jump(test: int, value: int, *, if_true: int, if_false: int) -> bytes:
    """Skip as many instructions as `if_true` or `if_false` says."""
    return _instruction(test, value, if_true, if_false)


def _return(action: int) -> bytes:
    return _instruction(_RETURN, action)


def _refusal(number: int | None, error: int) -> bytes:
    if number is None:
        return b""
    return _jump(_EQUAL, number, if_true=0, if_false=1) + _return(_ERROR | error)


def _check_argument(number: int, test: int, value: int, *, allows: bool, error: int) -> bytes:
    """Allow the call where its first argument passes the test (where it does not, without `allows`); else `error`."""
    return (
        _jump(_EQUAL, number, if_true=0, if_false=4)
        + _load(_FIRST_ARGUMENT)
        + _jump(test, value, if_true=int(allows), if_false=int(not allows))
        + _return(_ERROR | error)
        + _return(ALLOW)
    )

"""The seccomp program, run by an interpreter written from the kernel's documentation of classic BPF."""

import errno
import re
import struct
from pathlib import Path

import pytest

from luffy.errors import UserError
from luffy.sandbox.system_calls import MACHINES, REFUSED, filter_program

ALLOWED, KILLED, FAILS = "allowed", "killed", 0x00050000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
X86_64, AARCH64 = MACHINES["x86_64"].audit_architecture, MACHINES["aarch64"].audit_architecture


def verdict(program: bytes, architecture: int, number: int, first_argument: int = 0) -> str | int:
    """What the kernel does with a system call: `allowed`, `killed`, or the error number that it returns."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, first_argument, 0, 0, 0, 0, 0)
    instructions = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = instructions[at]
        at += 1
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:  # BPF_RET | BPF_K
            return {0x7FFF0000: ALLOWED, 0x80000000: KILLED}.get(value) or value ^ FAILS
        else:
            holds = {0x15: accumulator == value, 0x25: accumulator > value, 0x45: bool(accumulator & value)}[code]
            at += if_true if holds else if_false


@pytest.mark.parametrize(("machine", "column", "architecture"), [("x86_64", 0, X86_64), ("aarch64", 1, AARCH64)])
def test_every_refused_call_fails_and_ordinary_ones_pass(machine: str, column: int, architecture: int) -> None:
    program = filter_program(1, machine)
    for name, numbers in REFUSED.items():
        if numbers[column] is not None:
            assert verdict(program, architecture, numbers[column]) == errno.EPERM, name
    ordinary = {"read": (0, 63), "write": (1, 64), "mmap": (9, 222), "futex": (202, 98), "openat": (257, 56)}
    for name, numbers in (ordinary | {"execve": (59, 221), "getrandom": (318, 278)}).items():
        assert verdict(program, architecture, numbers[column]) == ALLOWED, name


def test_calls_of_another_architecture_kill_and_newer_ones_do_not_exist() -> None:
    program = filter_program(1, "x86_64")
    assert verdict(program, AARCH64, 0) == KILLED
    assert verdict(program, 0x40000003, 0) == KILLED  # a 32-bit call
    assert [verdict(program, X86_64, number) for number in (441, 442, 0x40000000, 0xFFFFFFFF)] == [
        ALLOWED,
        *[errno.ENOSYS] * 3,
    ]


def test_only_sockets_of_the_sandbox_itself_exist() -> None:
    program = filter_program(1, "x86_64")
    for call in (41, 53):  # socket, socketpair
        assert verdict(program, X86_64, call, 1) == ALLOWED  # AF_UNIX
        for family in (2, 10, 16, 17, 38, 40):  # IPv4, IPv6, netlink, packet, the kernel's cryptography, vsock
            assert verdict(program, X86_64, call, family) == errno.ENETUNREACH


def test_processes_never_start_and_threads_only_where_they_are_allowed() -> None:
    clone_thread, ordinary_fork = 0x3D0F00, 0x01200011
    alone, threaded = filter_program(1, "x86_64"), filter_program(2, "x86_64")
    for program in (alone, threaded):
        assert [verdict(program, X86_64, call) for call in (57, 58)] == [errno.EPERM] * 2  # fork, vfork
        assert verdict(program, X86_64, 56, ordinary_fork) == errno.EPERM
        assert verdict(program, X86_64, 435) == errno.ENOSYS  # clone3
    assert verdict(alone, X86_64, 56, clone_thread) == errno.EPERM
    assert verdict(threaded, X86_64, 56, clone_thread) == ALLOWED


def test_ties_to_the_parent_stay_changes_of_mode_have_no_effect_and_an_unknown_machine_is_named():
    program = filter_program(1, "x86_64")
    assert verdict(program, X86_64, 157, 1) == errno.EPERM  # PR_SET_PDEATHSIG
    assert [verdict(program, X86_64, 157, option) for option in (0, 2, 15, 23)] == [ALLOWED] * 4
    assert [verdict(filter_program(1, "x86_64"), X86_64, call) for call in (90, 91, 268)] == [0, 0, 0]
    with pytest.raises(UserError, match="this machine is riscv64"):
        filter_program(1, "riscv64")


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_numbers_are_those_of_the_kernel_headers(machine: str, column: int) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"needs the kernel's headers: {header}")
    known = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", header.read_text()))
    for name, numbers in REFUSED.items():
        if numbers[column] is not None:
            assert int(known[name]) == numbers[column], name

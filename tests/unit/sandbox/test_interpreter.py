"""The lines of a session, what is kept of its output, and its seccomp program, run as classic BPF is documented."""

import errno
import json
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.errors import UserError
from luffy.sandbox.interpreter import REPLIES, reply_line, request_line
from luffy.sandbox.interpreter_session import PrintedOutput
from luffy.sandbox.system_calls import MACHINES, REFUSED, filter_program


@given(st.text(st.characters()))  # lone surrogates included
def test_any_code_is_one_line_of_ascii_and_replies_to_different_calls_differ(code):
    line = request_line("0123", code)
    assert line.isascii() and line.count(b"\n") == 1 and line.endswith(b"\n")
    assert json.loads(line) == ["0123", code]
    replies = {reply_line(call, status) for call in ("a", "b") for status in REPLIES}
    assert len(replies) == 2 * len(REPLIES) and all(reply.count(b"\n") == 1 for reply in replies)


def printed(chunks, shown_bytes):
    output = PrintedOutput(shown_bytes)
    for chunk in chunks:
        output.add(chunk)
    return output


@given(st.lists(st.binary(max_size=40)), st.integers(64, 100))
def test_the_start_and_the_end_are_kept_however_the_bytes_arrive(chunks, shown_bytes):
    chunks = [bytes(byte % 128 for byte in chunk) for chunk in chunks]
    everything = b"".join(chunks)
    text = printed(chunks, shown_bytes).text()
    if len(everything) <= shown_bytes:
        assert text == everything.decode()
        return
    half = shown_bytes // 2
    head, tail = everything[:half].decode(), everything[half - shown_bytes :].decode()
    assert text == f"{head}\n[... {len(everything) - shown_bytes} bytes of output left out ...]\n{tail}"


@given(st.text(min_size=100), st.integers(64, 99))
def test_no_character_is_cut_in_half(text, shown_bytes):
    whole = text.encode(errors="replace").decode()
    output = printed([whole.encode()], shown_bytes)
    head, _, rest = output.text().partition("\n[... ")
    assert whole.startswith(head) and whole.startswith(output.start())
    assert whole.endswith(rest.partition(" bytes of output left out ...]\n")[2])


def test_bytes_that_are_no_text_are_replaced_and_memory_stays_bounded():
    assert printed([b"a\xff", b"\xe2\x82"], 64).text() == "a\ufffd\ufffd"
    assert printed([b"\xff" * 200], 64).start() == "\ufffd" * 32
    assert printed(["é".encode()[:1], "é".encode()[1:]], 64).text() == "é"
    output = PrintedOutput(64)
    for _ in range(1000):
        output.add(b"x" * 1000)
        assert len(output._head) + len(output._tail) < 64 + 2 * 1000
    assert output.size == 1_000_000


ALLOWED, KILLED, FAILS = "allowed", "killed", 0x00050000
EPERM, ENOSYS = errno.EPERM, errno.ENOSYS
X86_64, AARCH64 = MACHINES["x86_64"].audit_architecture, MACHINES["aarch64"].audit_architecture
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
EACH_MACHINE = pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])


def verdict(program, architecture, number, first_argument=0):
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


@EACH_MACHINE
def test_every_refused_call_fails_and_ordinary_ones_pass(machine, column):
    program = filter_program(1, machine)
    ordinary = {
        "read": (0, 63), "write": (1, 64), "mmap": (9, 222), "futex": (202, 98), "openat": (257, 56),
        "execve": (59, 221), "getrandom": (318, 278),
    }  # fmt: skip
    for expected, calls in ((EPERM, REFUSED), (ALLOWED, ordinary)):
        for name, numbers in calls.items():
            if numbers[column] is not None:
                found = verdict(program, MACHINES[machine].audit_architecture, numbers[column])
                assert found == expected, name


VERDICTS = {  # calls of x86_64, their first arguments, and what they get with one thread and with two
    "the newest that exists": ([441], [0], ALLOWED, ALLOWED),
    "newer ones": ([442, 0x40000000, 0xFFFFFFFF], [0], ENOSYS, ENOSYS),
    "sockets of the sandbox itself (AF_UNIX)": ([41, 53], [1], ALLOWED, ALLOWED),
    "IPv4, IPv6, netlink, packet, the kernel's cryptography, vsock": (
        [41, 53], [2, 10, 16, 17, 38, 40], errno.ENETUNREACH, errno.ENETUNREACH,
    ),
    "fork and vfork": ([57, 58], [0], EPERM, EPERM),
    "clone of a process": ([56], [0x01200011], EPERM, EPERM),
    "clone of a thread": ([56], [0x3D0F00], EPERM, ALLOWED),
    "clone3": ([435], [0], ENOSYS, ENOSYS),
    "ties to the parent (PR_SET_PDEATHSIG)": ([157], [1], EPERM, EPERM),
    "other options of prctl": ([157], [0, 2, 15, 23], ALLOWED, ALLOWED),
    "changes of mode, without effect": ([90, 91, 268], [0], 0, 0),
}  # fmt: skip


@pytest.mark.parametrize(("calls", "arguments", "alone", "threaded"), VERDICTS.values(), ids=VERDICTS)
def test_networks_processes_and_other_powers_are_out_of_reach(calls, arguments, alone, threaded):
    for num_threads, expected in ((1, alone), (2, threaded)):
        program = filter_program(num_threads, "x86_64")
        found = {verdict(program, X86_64, call, argument) for call in calls for argument in arguments}
        assert found == {expected}, num_threads


def test_calls_of_another_architecture_kill_and_an_unknown_machine_is_named():
    program = filter_program(1, "x86_64")
    assert verdict(program, AARCH64, 0) == KILLED
    assert verdict(program, 0x40000003, 0) == KILLED  # a 32-bit call
    with pytest.raises(UserError, match="this machine is riscv64"):
        filter_program(1, "riscv64")


@EACH_MACHINE
def test_numbers_are_those_of_the_kernel_headers(machine, column):
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"needs the kernel's headers: {header}")
    known = dict(re.findall(r"#define __NR_(\w+)\s+(\d+)", header.read_text()))
    found = {name: numbers[column] for name, numbers in REFUSED.items() if numbers[column] is not None}
    assert found == {name: int(known[name]) for name in found}

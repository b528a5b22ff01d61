"""What code does to the socket over which its interpreter is told what to run: close it, fill it, forge replies."""

import os
from contextlib import ExitStack

import psutil
import pytest
from sandboxed import require_bubblewrap, run_calls, run_code

from luffy.sandbox import ExecutionStatus


@pytest.fixture(autouse=True, scope="module")
def _bubblewrap() -> None:
    require_bubblewrap()


@pytest.mark.parametrize("and_then", ["", "while True: pass"])
def test_closing_every_descriptor_ends_the_session_with_a_status(and_then):
    result, after = run_calls(f"import os\nos.closerange(0, 64)\n{and_then}", "1")
    assert (result.status, result.session_is_over, after.status) == ("killed", True, "ended")


def find_control(code: str) -> str:
    """Code after a search for the control socket's descriptor."""
    return f"""
import os, stat
def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
control = next(fd for fd in range(64) if is_socket(fd))
{code}
"""


@pytest.mark.parametrize(
    "code",
    [
        "os.write(control, b'garbage\\n')",
        "os.write(control, b'ok\\n')",
        "os.write(control, b'0123456789abcdef ok\\n')",
        "os.write(control, b'\\xff' * 100)",
        "os.write(control, b'[' * 100_000)",
        "while True:\n    os.write(control, b'no line ends here')",
    ],
)
def test_garbage_on_the_control_socket_is_a_status(code):
    result, after = run_calls(find_control(code), "1")
    assert (result.status, result.session_is_over, after.status) == ("corrupted", True, "ended")


def test_a_forged_reply_deceives_nobody_but_its_own_session():
    forge = find_control("""
import sys
frame = sys._getframe()
while "call" not in frame.f_locals:
    frame = frame.f_back
os.write(control, f"{frame.f_locals['call']} ok\\n".encode())
""")
    first, second, third = run_calls(forge, "1", "2")
    assert first.status in ("ok", "corrupted")
    assert (second.status, third.status) in {("corrupted", "ended"), ("ended", "ended")}


def test_descriptors_sent_over_the_control_socket_stay_closed():
    send = find_control("""
import array, socket
s = socket.socket(fileno=os.dup(control))
s.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
""")
    before = psutil.Process().num_fds()
    assert run_code(send).status is ExecutionStatus.CORRUPTED
    assert psutil.Process().num_fds() <= before


def test_the_control_socket_is_below_the_limit_of_open_files_however_many_the_parent_has_open():
    with ExitStack() as held:
        for _ in range(200):
            held.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        assert run_code(find_control("print(control < 64)")).output == "True\n"
        assert run_code("import os\nos.closerange(0, 64)").status is ExecutionStatus.KILLED

"""Escapes from a real sandbox, each tried: what code reaches, starts, exhausts or forges, and what it leaves."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.patience import PATIENCE_S, wait_until_ended
from support.sandboxed import PATIENT, in_session, processes_below, require_bubblewrap, run_calls, run_code

from luffy.config.sandbox import SandboxConfig
from luffy.sandbox import ExecutionStatus, PythonSession, bubblewrap
from luffy.sandbox.system_calls import ALLOW, REFUSED

ROOT = Path(__file__).parents[2]
EVERYTHING_ALLOWED = struct.pack("<HBBI", 0x06, 0, 0, ALLOW)


@pytest.fixture(autouse=True, scope="module")
def _bubblewrap() -> None:
    require_bubblewrap()


@pytest.fixture
def namespaces_alone(monkeypatch) -> None:
    """Sandboxes that refuse no system call: what then holds is held by the namespaces."""
    monkeypatch.setattr(bubblewrap, "filter_program", lambda max_threads: EVERYTHING_ALLOWED)


class Attack(NamedTuple):
    code: str
    prints: str
    """All of its output."""


COLUMN = 0 if os.uname().machine == "x86_64" else 1
ATTACKS = {
    "installed packages, and luffy": Attack(
        """
import os
for folder, folders, files in os.walk("/"):
    if folder.endswith("-packages") and folders + files or "luffy" in folder + " ".join(files):
        print(folder, folders, files)
""",
        "",
    ),
    "descriptors of the parent": Attack(
        """
import os, stat
def kind(fd):
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return ""
    return {stat.S_IFCHR: "device", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}.get(stat.S_IFMT(mode), "file")
[kind(fd) for fd in range(64) if kind(fd)]
""",
        "['device', 'pipe', 'pipe', 'socket']\n",
    ),
    "refused system calls": Attack(
        f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {[(name, numbers[COLUMN]) for name, numbers in REFUSED.items() if numbers[COLUMN] is not None]}:
    if (libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno()) != (-1, 1):
        print(name)
""",
        "",
    ),
    "more rights": Attack(
        """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
def fails(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
    return False
data = ctypes.create_string_buffer(24)
libc.capget(ctypes.c_char_p(struct.pack("Ii", 0x20080522, 0)), data)
print(any(data.raw), libc.prctl(39, 0, 0, 0, 0), libc.prctl(23, 21, 0, 0, 0))
print(fails(os.setuid, 0), fails(os.setgid, 0), fails(os.setgroups, [0]), fails(os.chroot, "/tmp"))
print(libc.prctl(38, 0, 0, 0, 0), libc.mount(b"none", b"/tmp", b"tmpfs", 0, 0), libc.unshare(0x10000000))
""",
        "False 1 0\nTrue True True True\n-1 -1 -1\n",
    ),
    "higher limits": Attack(
        """
import resource
for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"):
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    try:
        resource.setrlimit(kind, (hard + 1, hard + 1))
        print("raised", name)
    except (ValueError, OSError):
        pass
""",
        "",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_prints_what_one_without_a_chance_prints(attack):
    result = run_code(ATTACKS[attack].code)
    assert (result.status, result.output) == ("ok", ATTACKS[attack].prints)


def test_nothing_of_the_workspace_the_home_or_the_environment_is_visible(tmp_path, monkeypatch):
    monkeypatch.setenv("CANARY_API_KEY", "canary-in-the-environment")
    canary = tmp_path / "canary.txt"
    canary.write_text("canary-in-a-file")
    code = f"""
import os
places = [{str(canary)!r}, {str(ROOT / "README.md")!r}, {str(Path.home())!r}]
places += ["/etc/passwd", "/proc", "/sys", "/run", "/var", "/home", "/usr/bin"]
print([place for place in places if os.path.exists(place)])
print([folder for folder, _, files in os.walk("/") if "canary.txt" in files])
print(sorted(os.environ), os.environb.get(b"CANARY_API_KEY"))
print(sorted(os.listdir("/")), os.listdir("/tmp"), os.getcwd(), os.getuid())
"""
    nothing, no_canary, variables, places = run_code(code).output.splitlines()
    assert (nothing, no_canary) == ("[]", "[]")
    assert "CANARY" not in variables and variables.endswith(" None")
    assert set(json.loads(places.partition("]")[0].replace("'", '"') + "]")) <= {
        *("dev", "etc", "interpreter.py", "lib", "lib64", "python", "tmp", "usr")
    }
    assert places.endswith(" [] /tmp 65534")


def test_nothing_outside_tmp_can_be_written(tmp_path):
    code = f"""
import os
for place in ("/new", "/python/new", "/python/lib/os.py", "/usr/lib/new", "/dev/new", "/interpreter.py", "/etc/new",
              {str(tmp_path / "new")!r}, "/var/tmp/new", "/dev/shm/new", "/packages/new"):
    try:
        open(place, "w")
    except OSError:
        continue
    print("written", place)
for folder, _, _ in os.walk("/"):
    if not folder.startswith("/tmp") and os.access(folder, os.W_OK):
        print("writable", folder)
"""
    assert run_code(code).output == ""
    assert not list(tmp_path.iterdir())


def test_the_devices_of_the_host_stay_as_they_are():
    before = Path("/dev/null").stat()
    code = "import os\nos.chmod('/dev/null', 0)\nos.fchmod(0, 0)\nopen('/dev/null', 'w').write('x')"
    assert run_code(code).status is ExecutionStatus.OK
    after = Path("/dev/null").stat()
    assert (before.st_mode, before.st_uid) == (after.st_mode, after.st_uid)


# Networks


class Listeners:
    """Sockets of this machine that wait for somebody."""

    def __init__(self, folder: Path) -> None:
        self.tcp, self.udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        self.path, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.all = (self.tcp, self.udp, self.path, self.abstract)
        self.path_name, self.abstract_name = str(folder / "s"), f"\0luffy-test-{os.getpid()}"
        self.tcp.bind(("127.0.0.1", 0))
        self.udp.bind(("127.0.0.1", 0))
        self.path.bind(self.path_name)
        self.abstract.bind(self.abstract_name)
        for listener in (self.tcp, self.path, self.abstract):
            listener.listen()
        for listener in self.all:
            listener.setblocking(False)

    def heard(self) -> list[str]:
        """Which of them somebody has reached."""
        found = []
        for name, listener in (("tcp", self.tcp), ("path", self.path), ("abstract", self.abstract)):
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append(name)
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(10)
            found.append("udp")
        return found


@pytest.fixture
def listeners(tmp_path) -> Iterator[Listeners]:
    listeners = Listeners(tmp_path)
    yield listeners
    for listener in listeners.all:
        listener.close()


def calls_of_all(listeners: Listeners) -> str:
    return f"""
import socket
def reach(family, kind, address):
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(5)
            s.connect(address)
            s.send(b"hello")
            return "reached"
    except OSError as error:
        return type(error).__name__
[reach(socket.AF_INET, socket.SOCK_STREAM, {listeners.tcp.getsockname()!r}),
 reach(socket.AF_INET, socket.SOCK_DGRAM, {listeners.udp.getsockname()!r}),
 reach(socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 80)),
 reach(socket.AF_UNIX, socket.SOCK_STREAM, {listeners.path_name!r}),
 reach(socket.AF_UNIX, socket.SOCK_STREAM, {listeners.abstract_name!r})]
"""


def test_no_network_is_reached(listeners):
    result = run_code(calls_of_all(listeners))
    assert result.output == "['OSError', 'OSError', 'OSError', 'FileNotFoundError', 'ConnectionRefusedError']\n"
    assert listeners.heard() == []
    # From outside they can be reached.
    exec(calls_of_all(listeners).rpartition("\n[")[0], names := {})
    assert names["reach"](socket.AF_INET, socket.SOCK_STREAM, listeners.tcp.getsockname()) == "reached"
    assert names["reach"](socket.AF_UNIX, socket.SOCK_STREAM, listeners.abstract_name) == "reached"
    assert listeners.heard() == ["tcp", "abstract"]


@pytest.mark.usefixtures("namespaces_alone")
def test_namespaces_alone_reach_no_network_and_give_no_rights(listeners):
    rights = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mount(b"none", b"/tmp", b"tmpfs", 0, 0), libc.umount2(b"/usr/lib", 2), libc.sethostname(b"x", 1)
"""
    networks, changes = run_calls(calls_of_all(listeners), rights)
    assert networks.status is ExecutionStatus.OK and "'reached'" not in networks.output.replace("'reached', 'OSE", "")
    assert listeners.heard() == []
    assert changes.output == "(-1, -1, -1)\n"


# Processes


def test_no_second_process_or_thread_starts():
    bomb = "import os\nwhile True:\n    os.fork()"
    results = run_calls(
        bomb,
        "import subprocess\nsubprocess.run(['/python/bin/python3', '-c', '1'])",
        "import os\nos.posix_spawn('/python/bin/python3', ['python'], {})",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import threading\nthreading.Thread(target=print).start()",
        "import pty\npty.fork()",
    )
    assert [result.status for result in results] == ["raised"] * 6
    assert results[0].output.endswith("PermissionError: [Errno 1] Operation not permitted\n")


@pytest.mark.usefixtures("namespaces_alone")
def test_a_process_that_leaves_its_session_ends_with_the_sandbox(started_here):
    fork_twice = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(100000)
    os._exit(0)
os.wait()[1]
"""

    async def use(session: PythonSession) -> tuple[str, int]:
        result = await session.run(fork_twice)
        return result.output, len(started_here())

    # bubblewrap, the interpreter, and the process that hides
    assert in_session(use, config=SandboxConfig(limits=PATIENT)) == ("0\n", 3)
    assert started_here() == []


def test_signals_reach_nobody_else():
    code = """
import os, signal
for pid in (1, 2, os.getppid(), -1, 0):
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        try:
            os.kill(pid, number)
        except OSError:
            pass
os.getpid(), os.getppid()
"""
    bystander = subprocess.Popen(["sleep", "1000"])
    result, after = run_calls(code, "1")
    still_runs = bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert (result.output, after.output, still_runs) == ("(1, 0)\n", "1\n", True)


def test_an_open_sandbox_is_killed_by_no_signal_of_ours(started_here):
    """Ctrl-C goes to a whole process group; a session of its own keeps it from the sandbox."""

    async def use(session: PythonSession) -> set[int]:
        return {os.getpgid(child.pid) for child in started_here()}

    groups = in_session(use)
    assert groups and os.getpgid(0) not in groups


CLINGS_TO_LIFE = """
import ctypes, signal, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: no signal when the parent dies
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    time.sleep(1000)
"""


@pytest.mark.parametrize("ending", ["kill", "exit"])
def test_no_process_outlives_ours(ending):
    endless = "while True: pass"
    program = f"""
import asyncio, os, sys
from luffy.config.sandbox import SandboxConfig
from luffy.sandbox import open_sandbox
async def main():
    config = SandboxConfig()
    sandbox = await open_sandbox(config)
    sessions = [await sandbox.open(config.limits) for _ in range(3)]
    running = asyncio.ensure_future(sessions[0].run({endless!r}))
    clinging = asyncio.ensure_future(sessions[2].run({CLINGS_TO_LIFE!r}))
    await sessions[1].run("x = 1")
    await asyncio.sleep(1)
    print("ready", flush=True)
    if {ending == "kill"}:
        await asyncio.sleep(100000)
    sys.stdin.readline()
    global kept
    kept = sessions
asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    ours = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert ours.stdout is not None and ours.stdout.readline() == b"ready\n"
    below = processes_below(ours.pid)
    assert len(below) == 6  # three times bubblewrap and an interpreter
    if ending == "kill":
        ours.kill()
    ours.communicate(b"\n", timeout=PATIENCE_S)
    wait_until_ended(below)

"""What a session does with ordinary code, with code that reaches a limit or strikes at the session itself."""

import asyncio
import gc
import os
import resource
import sys
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from support.patience import PATIENCE_S, ran, wait_until
from support.refusals import refused
from support.sandboxed import PATIENT, in_session, limits, require_bubblewrap, run_calls, run_code

from luffy.config.sandbox import SandboxConfig
from luffy.errors import LuffyError
from luffy.sandbox import ExecutionResult, PythonSession, open_sandbox

ROOT = Path(__file__).parents[2]
ENDLESS = "n = 0\nwhile True:\n    n += 1"


@pytest.fixture(autouse=True, scope="module")
def _bubblewrap() -> None:
    require_bubblewrap()


CALLS = [  # code, all of its output
    ("x = 6 * 7\nx", "42\n"),
    ("import math\nx += 1", ""),
    ("print(x)\nmath.tau > 6", "43\nTrue\n"),
    ("_", "True\n"),
    ("", ""),
    ("import sys\nfor n in (1, 2):\n    print(n)\n    print(-n, file=sys.stderr)\nx = sys.stdout.write('end')",
     "1\n-1\n2\n-2\nend"),
    ("import pickle, dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\npickle.loads(pickle.dumps(A(3)))",
     "A(x=3)\n"),
    ("import sys\nsys.stdout = sys.stderr = None\nsys.displayhook = id", ""),
    ("sys.stdout.close()", ""),
    ("print('heard')\n1", "heard\n1\n"),
]  # fmt: skip


def test_calls_share_names_show_their_last_expression_and_cannot_silence_the_next():
    results = run_calls(*(code for code, _ in CALLS))
    assert [(code, result.output) for (code, _), result in zip(CALLS, results, strict=True)] == CALLS
    assert {result.status for result in results} == {"ok"}


def test_a_traceback_shows_the_code_and_nothing_of_this_machine():
    first, second, third = run_calls("def f():\n    return 1 / 0\nf()", "import json\njson.loads('{')", "1 +")
    assert 'File "<call 1>", line 3, in <module>\n    f()\n' in first.output
    assert 'File "/python/lib/' in second.output
    assert third.output == '  File "<call 3>", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax\n'
    assert [result.status for result in (first, second, third)] == ["raised"] * 3


def test_sessions_share_nothing_and_print_a_set_in_the_same_order():
    async def run() -> list[str]:
        sandbox = await open_sandbox(SandboxConfig(limits=PATIENT))
        sessions = [await sandbox.open(PATIENT) for _ in range(4)]
        code = "import os\nopen('/tmp/n', 'x').write('{0}')\nn = {0}"
        await asyncio.gather(*(session.run(code.format(n)) for n, session in enumerate(sessions)))
        look = "print(n, open('n').read(), os.listdir())\n{str(n) for n in range(40)}"
        results = await asyncio.gather(*(session.run(look) for session in sessions))
        await asyncio.gather(*(session.close() for session in sessions))
        return [result.output for result in results]

    seen, sets = zip(*(output.splitlines() for output in asyncio.run(run())), strict=True)
    assert list(seen) == [f"{n} {n} ['n']" for n in range(4)]
    assert len(set(sets)) == 1


def test_calls_of_a_session_wait_for_each_other():
    async def use(session: PythonSession) -> list[ExecutionResult]:
        calls = [session.run(f"import time\ntime.sleep({0.2 - n / 20})\nprint({n})") for n in range(4)]
        return await asyncio.gather(*calls)

    assert [result.output for result in in_session(use)] == ["0\n", "1\n", "2\n", "3\n"]


@pytest.mark.slow
def test_packages_come_on_request():
    config = SandboxConfig(limits=PATIENT, packages=("numpy", "sympy", "mpmath"))
    numbers = "import numpy\nfloat(numpy.linalg.norm(numpy.ones(16)))"
    symbols = "import sympy\nx = sympy.Symbol('x')\nsympy.solve(x**2 - 2, x)"
    found = [result.output for result in run_calls(numbers, symbols, config=config)]
    assert found == ["4.0\n", "[-sqrt(2), sqrt(2)]\n"]
    assert "No module named 'numpy'" in run_code(numbers).output


def test_cpu_time_of_a_session_is_limited():
    results = run_calls(*[ENDLESS] * 4, within=limits(call_cpu_s=0.5, session_cpu_s=1.0))
    assert results[-1].status == "ended"
    stopped = next(result for result in results if result.session_is_over)
    assert "[stopped: the session used 1 s of CPU time; the session is over" in stopped.output


def test_an_idle_session_ends_at_its_time(started_here):
    async def use(session: PythonSession) -> ExecutionResult:
        async with asyncio.timeout(PATIENCE_S):
            while started_here():
                await asyncio.sleep(0.05)
        return await session.run("1")

    result = in_session(use, within=limits(call_wall_s=0.5, session_wall_s=0.5))
    assert (result.status, result.session_is_over) == ("timed_out", True)
    assert "the session took 0.5 s" in result.output


# Limits, ends, and the socket over which the interpreter is told what to run


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


class Call(NamedTuple):
    code: str
    status: str
    says: str = ""
    """Part of its output, apart from ends of lines."""


SHORT = {"call_cpu_s": 0.3}
SHORT_AND_GRACELESS = {"call_cpu_s": 0.3, "call_wall_s": 2.0, "interrupt_grace_s": 0.2}
INTERRUPTED = "KeyboardInterrupt[stopped: the call used 0.3 s of CPU time; names defined before are kept]"
FLOODED = "y" * 32 + "[stopped: the call printed more than 1048576 bytes;"
NOT_RUN = Call("1", "ended", "[not run: the session is over: the call ")
ENDS = [
    ("import sys\nsys.exit()", "ok"),
    ("exit(3)", "raised"),
    ("raise KeyboardInterrupt", "raised"),
    ("def f(): return f()\nf()", "raised"),
    ("class E(Exception):\n    def __str__(self): raise self\nraise E", "raised"),
    ("x = '\ud800'", "raised"),
    ("\0", "raised"),
    ("import os\nos._exit(0)", "killed"),
    ("import ctypes\nctypes.string_at(0)", "killed"),
    ("import os, sys\nos.execv(sys.executable, ['python', '-c', 'print(1)'])", "killed"),
    (find_control("os.write(control, b'garbage\\n')"), "corrupted"),
    (find_control("os.write(control, b'ok\\n')"), "corrupted"),
    (find_control("os.write(control, b'0123456789abcdef ok\\n')"), "corrupted"),
    (find_control("os.write(control, b'\\xff' * 100)"), "corrupted"),
    (find_control("os.write(control, b'[' * 100_000)"), "corrupted"),
    (find_control("while True:\n    os.write(control, b'no line ends here')"), "corrupted"),
    ("import os\nos.closerange(0, 64)", "killed"),
    ("import os\nos.closerange(0, 64)\nwhile True: pass", "killed"),
]
"""Codes that end their call in some way, and their status: after some of them the session is over."""
SESSIONS = {
    "memory": ({}, [
        Call("bytearray(10 ** 12)", "out_of_memory"),
        Call("held = []\nwhile True:\n    held.append(bytearray(100_000))", "out_of_memory", "MemoryError"),
        Call("try:\n    bytearray(10 ** 12)\nexcept MemoryError:\n    print('caught')", "ok", "caught"),
        Call("del held\nlen(bytearray(10 ** 8))", "ok", "100000000"),
    ]),
    "disk": ({}, [
        Call("for n in range(100):\n    open(f'/tmp/{n}', 'wb').write(bytes(3 << 20))", "raised", "No space left"),
        Call("open('/tmp/large', 'wb').write(bytes(8 << 20))", "raised", "OSError: [Errno "),
        Call("for n in range(10 ** 7):\n    open(f'/tmp/{n}', 'w').close()", "file_limit"),
        Call("1", "ended"),
    ]),
    "descriptors": ({}, [Call("[open('/dev/null') for _ in range(1000)]", "raised", "Too many open files")]),
    "output": ({"shown_output_bytes": 64}, [
        Call("while True:\n    print('y' * 100)", "output_limit", FLOODED),
        Call("import os\nwhile True:\n    os.write(2, b'y' * 100)", "output_limit", FLOODED),
        Call("print('y' * 3_000_000)", "output_limit", FLOODED),
        Call("1", "ok", "1"),
    ]),
    "long output": ({"shown_output_bytes": 103}, [
        Call("print('é' * 500 + 'z' * 10)", "ok",
             "é" * 25 + "[... 908 bytes of output left out ...]" + "é" * 20 + "z" * 10),
    ]),
    "time, also of a session made deaf": (SHORT, [
        Call("import signal\nsignal.signal(2, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, [2])", "ok"),
        Call("n = 0\nwhile True:\n    n += 1", "timed_out", INTERRUPTED),
        Call("import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", "timed_out", INTERRUPTED),
        Call("x = 10 ** 10 ** 8", "timed_out", INTERRUPTED),
        Call("n > 0", "ok", "True"),
    ]),
    "time that looks at no signal": (SHORT_AND_GRACELESS, [Call("max(range(10 ** 15))", "timed_out"), NOT_RUN]),
    "time that swallows signals": (SHORT_AND_GRACELESS, [
        Call("import time\nwhile True:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass",
             "timed_out"),
        NOT_RUN,
    ]),
    "waiting": ({"call_cpu_s": 0.3, "call_wall_s": 3.0}, [
        Call("import time\ntime.sleep(0.6)", "ok"),  # costs no CPU time
        Call("time.sleep(10000)", "timed_out", "the call took 3 s"),
    ]),
    **{code: ({}, [Call(code, status), Call("1", "ok" if status in ("ok", "raised") else "ended")])
       for code, status in ENDS},
}  # fmt: skip


@pytest.mark.parametrize("name", SESSIONS)
def test_every_call_of_a_session_has_the_status_of_its_end(name):
    changed, calls = SESSIONS[name]
    results = run_calls(*(call.code for call in calls), within=limits(**changed))
    for call, result in zip(calls, results, strict=True):
        assert result.status == call.status, result
        assert call.says in result.output.replace("\n", ""), result


def test_output_without_end_fills_no_memory_of_ours():
    flood = "while True:\n    try:\n        os.write(1, chunk)\n    except BaseException:\n        pass"
    tracemalloc.start()
    result = run_code(f"import os\nchunk = bytes(1 << 20)\n{flood}", within=limits(interrupt_grace_s=1.0))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (result.status, result.session_is_over) == ("output_limit", True)
    assert peak_bytes < 8 << 20


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
    assert run_code(send).status == "corrupted"
    assert psutil.Process().num_fds() <= before


def test_the_control_socket_is_below_the_limit_of_open_files_however_many_the_parent_has_open():
    with ExitStack() as held:
        for _ in range(200):
            held.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        assert run_code(find_control("print(control < 64)")).output == "True\n"
        assert run_code("import os\nos.closerange(0, 64)").status == "killed"


# Ends


def test_a_cancelled_call_ends_its_session(started_here):
    async def use(session: PythonSession) -> ExecutionResult:
        call = asyncio.ensure_future(session.run("print(1)\nwhile True: pass"))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await session.run("1")

    result = in_session(use)
    assert (result.status, result.output) == ("ended", "[not run: the session is over: an earlier call was cancelled]")
    wait_until(lambda: not started_here(), "the end of the interpreter")


def test_closing_ends_a_call_in_flight_and_all_processes(started_here):
    async def use(session: PythonSession) -> tuple[ExecutionResult, ExecutionResult, list[psutil.Process]]:
        call = asyncio.ensure_future(session.run("while True: pass"))
        await asyncio.sleep(0.2)
        await session.close()
        left = started_here()
        return await call, await session.run("1"), left

    stopped, after, left = in_session(use)
    assert (stopped.status, after.status, left) == ("killed", "ended", [])


def test_a_session_that_is_garbage_leaves_no_process(started_here):
    async def run() -> None:
        session = await (await open_sandbox(SandboxConfig(limits=PATIENT))).open(PATIENT)
        await session.run("x = 1")
        assert started_here()
        del session
        gc.collect()

    asyncio.run(run())
    wait_until(lambda: not started_here(), "the end of the interpreter")


def test_a_forked_process_ends_no_session_of_ours():
    async def run() -> str:
        session = await (await open_sandbox(SandboxConfig(limits=PATIENT))).open(PATIENT)
        child = os.fork()
        if child == 0:
            del session
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        result = await session.run("1")
        await session.close()
        return result.output

    assert asyncio.run(run()) == "1\n"


def test_descriptors_are_closed_with_the_sessions():
    counts = set()
    for code in ("1", "import os\nos._exit(1)", "1"):
        run_code(code)
        counts.add(psutil.Process().num_fds())
    assert len(counts) == 1


# Checks at the start


def open_for(**config: object) -> None:
    asyncio.run(open_sandbox(SandboxConfig.model_validate({"limits": PATIENT, **config})))


def test_what_keeps_a_sandbox_from_starting_is_named_with_its_remedy(monkeypatch, tmp_path):
    for package, named in (("nothing-like-this", "not installed"), ("sympy", "does not import")):
        with refused("sandbox.packages", package, named):
            open_for(packages=(package,))
    with refused("sandbox.limits", "6 * 7", "1e-09"):
        open_for(limits=limits(call_wall_s=1e-9))
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with refused("bwrap: setting up uid map: Permission denied", "kernel.unprivileged_userns_clone=1"):
        open_for()
    monkeypatch.setenv("PATH", "/nowhere")
    with refused("apt-get install bubblewrap"):
        open_for()


def test_too_few_descriptors_are_named_with_their_remedy():
    async def run() -> None:
        sandbox = await open_sandbox(SandboxConfig(limits=PATIENT))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 3, hard))
        try:
            await sandbox.open(PATIENT)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    with pytest.raises(LuffyError, match="Too many open files; a session holds four descriptors: raise `ulimit -n`"):
        asyncio.run(run())


# As whom it runs

ORDINARY = """
import asyncio, os
from luffy.config.sandbox import SandboxConfig, SandboxLimits
from luffy.sandbox import open_sandbox
bomb = '''
import threading, time
started = 1
try:
    while True:
        threading.Thread(target=time.sleep, args=(10 ** 5,), daemon=True).start()
        started += 1
except RuntimeError:
    pass
started
'''
async def main():
    limits = SandboxLimits(max_threads=4, call_wall_s=600.0)
    session = await (await open_sandbox(SandboxConfig(limits=limits))).open(limits)
    for code in ("6 * 7", bomb, "import os\\nos.fork()", "import os\\nos.getuid(), os.listdir('/tmp')"):
        print((await session.run(code)).output.splitlines()[-1])
    await session.close()
    print(os.getuid())
asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs the superuser, to become somebody else")
def test_threads_are_counted_for_an_ordinary_user_and_refused_for_the_superuser():
    with refused("sandbox.limits.max_threads", "4"):
        open_for(limits=limits(max_threads=4))
    program = f"/usr/bin/python3.{sys.version_info.minor}"
    if not Path(program).exists():
        pytest.skip(f"needs an interpreter that everybody may run: {program}")
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    result = ran([program, "-c", ORDINARY], cwd="/", env=env, user=12345, group=12345, extra_groups=[])
    not_permitted = "PermissionError: [Errno 1] Operation not permitted"
    assert result.stdout.splitlines() == ["42", "4", not_permitted, "(65534, [])", "12345"], result.stderr

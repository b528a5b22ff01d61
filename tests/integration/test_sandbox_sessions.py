"""What a session of a real sandbox does with ordinary code, and with code that reaches a limit."""

import asyncio
import gc
import os
import resource
import tracemalloc
from contextlib import ExitStack

import psutil
import pytest
from support.patience import PATIENCE_S, wait_until
from support.sandboxed import PATIENT, limits, require_bubblewrap, run_calls, run_code

from luffy.config.sandbox import SandboxConfig
from luffy.errors import LuffyError, UserError
from luffy.sandbox import ExecutionResult, ExecutionStatus, open_sandbox

ENDLESS = "n = 0\nwhile True:\n    n += 1"
ENDLESS_IN_C = "max(range(10 ** 15))"  # looks at no signal before its end
HUGE_POWER = "x = 10 ** 10 ** 8"
SWALLOWS = "import time\nwhile True:\n    try:\n        time.sleep(1)\n    except BaseException:\n        pass"
CATASTROPHIC = "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')"


@pytest.fixture(autouse=True, scope="module")
def _bubblewrap() -> None:
    require_bubblewrap()


def statuses(results: list[ExecutionResult]) -> list[str]:
    return [result.status for result in results]


def test_names_live_from_call_to_call_and_the_last_expression_is_shown():
    results = run_calls("x = 6 * 7\nx", "import math\nx += 1", "print(x)\nmath.tau > 6", "_", "")
    assert [result.output for result in results] == ["42\n", "", "43\nTrue\n", "True\n", ""]
    assert statuses(results) == ["ok"] * 5


def test_both_streams_arrive_in_their_order():
    code = (
        "import sys\nfor n in range(3):\n    print(n)\n    print(-n, file=sys.stderr)\nsys.stdout.write('end')\n1 / 0"
    )
    assert run_code(code).output.startswith("0\n0\n1\n-1\n2\n-2\nendTraceback")


def test_a_traceback_shows_the_code_and_nothing_of_this_machine():
    first, second, third = run_calls("def f():\n    return 1 / 0\nf()", "import json\njson.loads('{')", "1 +")
    assert 'File "<call 1>", line 3, in <module>\n    f()\n' in first.output
    assert 'File "/python/lib/' in second.output
    assert third.output == '  File "<call 3>", line 1\n    1 +\n       ^\nSyntaxError: invalid syntax\n'
    assert statuses([first, second, third]) == ["raised"] * 3


@pytest.mark.parametrize(
    ("code", "status"),
    [
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
    ],
)
def test_every_end_of_a_call_has_its_status(code, status):
    result, after = run_calls(code, "1")
    assert result.status == status
    assert after.status == ("ended" if status == "killed" else "ok")


def test_a_call_cannot_silence_the_next():
    spoiled = "import sys\nsys.stdout = sys.stderr = None\nsys.displayhook = id"
    results = run_calls(spoiled, "sys.stdout.close()", "print('heard')\n1")
    assert results[2].output == "heard\n1\n"


def test_a_call_cannot_make_the_next_one_deaf():
    deafened = (
        "import signal\nsignal.signal(2, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, [2])\nkept = 1"
    )
    _, stopped, after = run_calls(deafened, ENDLESS, "kept", within=limits(call_cpu_s=0.3))
    assert (stopped.status, after.output) == ("timed_out", "1\n")


def test_classes_of_a_session_are_those_of_its_main_module():
    code = "import pickle, dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\npickle.loads(pickle.dumps(A(3)))"
    assert run_code(code).output == "A(x=3)\n"


def test_two_sessions_print_a_set_in_the_same_order():
    code = "{str(n) for n in range(40)}"
    assert run_code(code).output == run_code(code).output


def test_sessions_share_nothing():
    async def run() -> list[str]:
        sandbox = await open_sandbox(SandboxConfig(limits=PATIENT))
        sessions = [await sandbox.open(PATIENT) for _ in range(8)]
        code = "import os\nopen('/tmp/n', 'x').write('{0}')\nn = {0}"
        await asyncio.gather(*(session.run(code.format(n)) for n, session in enumerate(sessions)))
        results = await asyncio.gather(*(session.run("n, open('n').read(), os.listdir()") for session in sessions))
        await asyncio.gather(*(session.close() for session in sessions))
        return [result.output for result in results]

    assert asyncio.run(run()) == [f"({n}, '{n}', ['n'])\n" for n in range(8)]


def test_calls_of_a_session_wait_for_each_other():
    async def run() -> list[ExecutionResult]:
        session = await (await open_sandbox(SandboxConfig(limits=PATIENT))).open(PATIENT)
        calls = [session.run(f"import time\ntime.sleep({0.2 - n / 20})\nprint({n})") for n in range(4)]
        results = await asyncio.gather(*calls)
        await session.close()
        return results

    assert [result.output for result in asyncio.run(run())] == ["0\n", "1\n", "2\n", "3\n"]


def test_packages_come_on_request():
    config = SandboxConfig(limits=PATIENT, packages=("numpy", "sympy", "mpmath"))
    numbers = "import numpy\nfloat(numpy.linalg.norm(numpy.ones(16)))"
    symbols = "import sympy\nx = sympy.Symbol('x')\nsympy.solve(x**2 - 2, x)"
    assert [result.output for result in run_calls(numbers, symbols, config=config)] == [
        "4.0\n",
        "[-sqrt(2), sqrt(2)]\n",
    ]
    assert "No module named 'numpy'" in run_code(numbers).output


# Limits


@pytest.mark.parametrize("code", [ENDLESS, CATASTROPHIC, HUGE_POWER])
def test_a_call_past_its_cpu_time_is_interrupted_and_the_session_survives(code):
    _, result, after = run_calls("kept = 1", code, "kept", within=limits(call_cpu_s=0.3))
    assert result.status is ExecutionStatus.TIMED_OUT and not result.session_is_over
    assert (
        "KeyboardInterrupt\n[stopped: the call used 0.3 s of CPU time; names defined before are kept]" in result.output
    )
    assert after.output == "1\n"


@pytest.mark.parametrize("code", [ENDLESS_IN_C, SWALLOWS])
def test_a_call_that_cannot_be_interrupted_is_killed_and_the_session_says_so(code):
    within = limits(call_cpu_s=0.3, call_wall_s=2.0, interrupt_grace_s=0.2)
    result, after = run_calls(code, "1", within=within)
    assert result.status is ExecutionStatus.TIMED_OUT and result.session_is_over
    assert after.status is ExecutionStatus.ENDED and after.output.startswith("[not run: the session is over: the call ")


def test_waiting_costs_no_cpu_time_but_has_a_limit_of_its_own():
    waited, stopped = run_calls(
        "import time\ntime.sleep(0.6)", "time.sleep(10000)", within=limits(call_cpu_s=0.3, call_wall_s=3.0)
    )
    assert (waited.status, stopped.status) == ("ok", "timed_out")
    assert "the call took 3 s" in stopped.output


def test_cpu_time_of_a_session_is_limited():
    within = limits(call_cpu_s=0.5, session_cpu_s=1.0)
    results = run_calls(*[ENDLESS] * 4, within=within)
    assert results[-1].status == "ended"
    stopped = next(result for result in results if result.session_is_over)
    assert "[stopped: the session used 1 s of CPU time; the session is over" in stopped.output


def test_an_idle_session_ends_at_its_time(started_here):
    async def run() -> ExecutionResult:
        session = await (await open_sandbox(SandboxConfig(limits=PATIENT))).open(
            limits(call_wall_s=0.5, session_wall_s=0.5)
        )
        async with asyncio.timeout(PATIENCE_S):
            while started_here():
                await asyncio.sleep(0.05)
        return await session.run("1")

    result = asyncio.run(run())
    assert (result.status, result.session_is_over) == ("timed_out", True)
    assert "the session took 0.5 s" in result.output


def test_memory_is_limited_and_the_session_survives():
    at_once, bit_by_bit, inside, after = run_calls(
        "bytearray(10 ** 12)",
        "held = []\nwhile True:\n    held.append(bytearray(100_000))",
        "try:\n    bytearray(10 ** 12)\nexcept MemoryError:\n    print('caught')",
        "del held\nlen(bytearray(10 ** 8))",
    )
    assert statuses([at_once, bit_by_bit, inside, after]) == ["out_of_memory", "out_of_memory", "ok", "ok"]
    assert bit_by_bit.output.endswith("MemoryError\n")


def test_output_is_cut_in_its_middle_and_says_so():
    result = run_code("print('é' * 500 + 'z' * 10)", within=limits(shown_output_bytes=103))
    head, note, tail = result.output.split("\n", 2)
    assert (head, note) == ("é" * 25, "[... 908 bytes of output left out ...]")
    assert tail == "é" * 20 + "z" * 10 + "\n"
    assert result.status is ExecutionStatus.OK


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    print('y' * 100)",
        "import os\nwhile True:\n    os.write(2, b'y' * 100)",
        "print('y' * 3_000_000)",
    ],
)
def test_output_without_end_is_stopped_and_the_session_survives(code):
    result, after = run_calls(code, "1", within=limits(shown_output_bytes=64))
    assert result.status is ExecutionStatus.OUTPUT_LIMIT
    assert result.output.replace("\n", "").startswith("y" * 32 + "[stopped: the call printed more than 1048576 bytes;")
    assert after.output == "1\n"


def test_output_without_end_fills_no_memory_of_ours():
    flood = "while True:\n    try:\n        os.write(1, chunk)\n    except BaseException:\n        pass"
    code = f"import os\nchunk = bytes(1 << 20)\n{flood}"
    tracemalloc.start()
    result = run_code(code, within=limits(interrupt_grace_s=1.0))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (result.status, result.session_is_over) == ("output_limit", True)
    assert peak_bytes < 8 << 20


def test_the_disk_is_limited_in_bytes_and_in_files():
    fill = "for n in range(100):\n    open(f'/tmp/{n}', 'wb').write(bytes(3 << 20))"
    large = "open('/tmp/large', 'wb').write(bytes(8 << 20))"
    many = "for n in range(10 ** 7):\n    open(f'/tmp/{n}', 'w').close()"
    full, too_large, too_many = run_calls(fill, large, many)
    assert full.output.endswith("OSError: [Errno 28] No space left on device\n")
    assert "File too large" in too_large.output or "No space left" in too_large.output
    assert (too_many.status, too_many.session_is_over) == ("file_limit", True)


def test_open_files_are_limited():
    assert "Too many open files" in run_code("held = [open('/dev/null') for _ in range(1000)]").output


# Ends


def test_a_cancelled_call_ends_its_session(started_here):
    async def run() -> ExecutionResult:
        session = await (await open_sandbox(SandboxConfig(limits=PATIENT))).open(PATIENT)
        call = asyncio.ensure_future(session.run("print(1)\nwhile True: pass"))
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await session.run("1")

    result = asyncio.run(run())
    assert (result.status, result.output) == ("ended", "[not run: the session is over: an earlier call was cancelled]")
    wait_until(lambda: not started_here(), "the end of the interpreter")


def test_closing_ends_a_call_in_flight_and_all_processes(started_here):
    async def run() -> tuple[ExecutionResult, ExecutionResult, list[psutil.Process]]:
        session = await (await open_sandbox(SandboxConfig(limits=PATIENT))).open(PATIENT)
        call = asyncio.ensure_future(session.run("while True: pass"))
        await asyncio.sleep(0.2)
        await session.close()
        left = started_here()
        await session.close()
        return await call, await session.run("1"), left

    stopped, after, left = asyncio.run(run())
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
    def open_descriptors() -> int:
        return psutil.Process().num_fds()

    async def run() -> list[int]:
        sandbox, counts = await open_sandbox(SandboxConfig(limits=PATIENT)), []
        for code in ("1", "import os\nos._exit(1)", "1"):
            session = await sandbox.open(PATIENT)
            await session.run(code)
            await session.close()
            counts.append(open_descriptors())
        return counts

    assert len(set(asyncio.run(run()))) == 1


# The socket over which the interpreter is told what to run


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


# Checks at the start


def refusal(**config: object) -> str:
    with pytest.raises(UserError) as error:
        asyncio.run(open_sandbox(SandboxConfig.model_validate({"limits": PATIENT, **config})))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_bubblewrap_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "install it, on Debian and Ubuntu by `apt-get install bubblewrap`" in refusal()


def test_refused_namespaces_are_named_with_their_remedy(monkeypatch, tmp_path):
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    said = refusal()
    assert "bwrap: setting up uid map: Permission denied" in said and "kernel.unprivileged_userns_clone=1" in said


def test_a_package_that_cannot_be_imported_is_named():
    assert "sandbox.packages: nothing-like-this is not installed" in refusal(packages=("nothing-like-this",))
    assert "sandbox.packages: sympy does not import" in refusal(packages=("sympy",))


def test_limits_too_low_for_anything_are_named():
    said = refusal(limits=limits(call_wall_s=1e-9))
    assert "sandbox.limits: they do not let even `6 * 7` be computed (timed_out: [stopped: the call took 1e-09" in said

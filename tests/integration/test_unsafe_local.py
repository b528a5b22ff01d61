"""Sessions without a sandbox: what they still promise."""

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path

import psutil
from support.patience import PATIENCE_S, wait_until_ended
from support.sandboxed import PATIENT, limits, processes_below, run_calls

from luffy.config.sandbox import SandboxConfig
from luffy.sandbox import open_sandbox

ROOT = Path(__file__).parents[2]
UNSAFE = SandboxConfig(kind="unsafe_local", unsafe_local=True, packages=("numpy",), limits=PATIENT)


def test_it_warns_and_runs_code_like_the_sandbox(caplog):
    with caplog.at_level(logging.WARNING):
        results = run_calls("x = 6 * 7\nx", "1 / 0", "import numpy\nint(numpy.ones(3).sum())", config=UNSAFE)
    assert "runs the model's code with all rights of this user" in caplog.text
    assert [result.status for result in results] == ["ok", "raised", "ok"]
    assert (results[0].output, results[2].output) == ("42\n", "3\n")


def test_its_limits_end_calls():
    interrupted, endless, large, after = run_calls(
        "while True:\n    n = 1",
        "while True:\n    print('y' * 100)",
        "bytearray(10 ** 12)",
        "import os\nos._exit(3)",
        within=limits(call_cpu_s=0.3),
        config=UNSAFE,
    )
    assert [result.status for result in (interrupted, endless, large, after)] == [
        *("timed_out", "output_limit", "out_of_memory", "killed")
    ]
    assert "the interpreter ended with exit code 3" in after.output


def test_code_does_not_see_the_environment_and_leaves_no_folder(monkeypatch):
    monkeypatch.setenv("CANARY_API_KEY", "canary")
    code = "import os\nopen('file', 'w').close()\nprint(os.getcwd())\nprint('CANARY_API_KEY' in os.environ)"
    folder, is_seen = run_calls(code, config=UNSAFE)[0].output.splitlines()
    assert is_seen == "False"
    assert not Path(folder).parent.exists()


def test_closing_kills_what_the_code_has_started(started_here):
    async def run() -> list[psutil.Process]:
        session = await (await open_sandbox(UNSAFE)).open(PATIENT)
        await session.run("import subprocess\nchild = subprocess.Popen(['sleep', '100000'])")
        below = started_here()
        await session.close()
        return below

    below = asyncio.run(run())
    assert len(below) == 2
    wait_until_ended(below)


def test_it_dies_with_us(tmp_path):
    program = f"""
import asyncio
from luffy.config.sandbox import SandboxConfig
from luffy.sandbox import open_sandbox
async def main():
    config = SandboxConfig.model_validate_json({UNSAFE.model_dump_json()!r})
    session = await (await open_sandbox(config)).open(config.limits)
    print("ready", flush=True)
    await session.run("while True: pass")
asyncio.run(main())
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody deletes the session's folder
    ours = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=env, stdout=subprocess.PIPE)
    assert ours.stdout is not None and ours.stdout.readline() == b"ready\n"
    below = processes_below(ours.pid)
    ours.kill()
    ours.wait(PATIENCE_S)
    assert len(below) == 1
    wait_until_ended(below)

"""Several ranks on this machine: forked from a process with their libraries, or by torchrun."""

import functools
import json
import os
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from luffy.flows.prefect_api import free_port
from support.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
# The address is given, since torchrun would look this machine's own name up.
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")


def on_ranks(function: str, *arguments: object) -> Any:
    """What `function` of tests/distributed/work.py returns on rank 0 of two; the arguments become JSON."""
    with tempfile.TemporaryDirectory() as output:
        order = {"function": function, "arguments": arguments, "ranks": 2, "port": free_port(), "output": output}
        codes = _server().run(order)
        failed = next((rank for rank, code in enumerate(codes) if code not in (0, -9)), 0)
        assert not any(codes), (codes, *((Path(output) / f"{rank}.err").read_text()[-3000:] for rank in {failed, 0}))
        return json.loads((Path(output) / "result").read_text())


class _RankServer:
    """tests/distributed/rank_server.py, which ends with this process: its standard input does."""

    def __init__(self) -> None:
        command = [sys.executable, str(ROOT / "tests/distributed/rank_server.py")]
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # each, as torchrun has it
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, cwd=ROOT, env=one_thread, **pipes)

    def run(self, order: dict[str, object]) -> list[int]:
        """The exit codes of the ranks; those of one that takes too long are killed with the server."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order, default=str) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline() if waiting.select(PATIENCE_S) else ""
        if not line:
            self._process.kill()
            _server.cache_clear()
            raise AssertionError(f"{order['function']} has not ended for {PATIENCE_S:g} s, or its server has died")
        return json.loads(line)


@functools.cache
def _server() -> _RankServer:
    return _RankServer()


def torchrun(ranks: int, script: str) -> subprocess.CompletedProcess[str]:
    """The ended program; one that takes too long fails, and none of its ranks is left."""
    command = [*_TORCHRUN, "--nproc-per-node", str(ranks), script]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        out, err = launcher.communicate(timeout=PATIENCE_S)
    finally:
        if launcher.poll() is None:
            # Ranks have sessions of their own and would outlive the launcher.
            for process in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
                process.kill()
    return subprocess.CompletedProcess(command, launcher.returncode, out, err)

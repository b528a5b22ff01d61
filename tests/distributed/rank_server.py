"""Forks ranks from a process that has loaded their libraries; each calls a function of tests/distributed/work.py.

Each line of standard input is an order:
`{"function": NAME, "arguments": [...], "ranks": 2, "port": 29500, "output": FOLDER}`. The ranks have the environment
that torchrun gives, and write to `FOLDER/0.err`, and so on; `FOLDER/result` has what rank 0 returns. The answer is a
line with their exit codes; once one of them fails, the others are killed, as by torchrun. The server ends with its
standard input.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from luffy.library_loading import without_collections
from luffy.pipeline.warm_start import LIBRARIES
from luffy.processes import die_with

# Muon is what DeepSpeed loads for the first engine under ZeRO, with torch's whole compiler.
# None of them starts a thread, whose locks a fork would leave locked.
OWN = ("work", "deepspeed.runtime.zero.muon.muon_optimizer")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed says on standard output that there is no GPU
    with without_collections():  # DeepSpeed collects garbage for every engine
        for name in (*LIBRARIES, *OWN):
            importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        assert len(list(Path("/proc/self/task").iterdir())) == 1
        codes = ended([started(order, rank) for rank in range(order["ranks"])])
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


def started(order: dict, rank: int) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        run(order, rank, server)
    return pid


def run(order: dict, rank: int, server: int) -> NoReturn:
    """One rank, from the fork to its exit."""
    code = 1
    try:
        die_with(server, signal.SIGKILL)
        file = os.open(Path(order["output"], f"{rank}.err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        ranks = str(order["ranks"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(order["port"]))
        result = importlib.import_module("work").call(order["function"], order["arguments"])
        if rank == 0:
            Path(order["output"], "result").write_text(json.dumps(result))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def ended(pids: list[int]) -> list[int]:
    """The exit code of each process (-n for signal n), after all have ended."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if codes[pid] != 0:
            for other in set(pids) - set(codes):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main()

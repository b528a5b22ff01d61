"""Runs stage programs in this process, one after the other, so that they share a vLLM engine.

    python -m luffy.stages.engine_host DESCRIPTOR

The other end of the connection DESCRIPTOR sends orders (`luffy.pipeline.engine_process`), and gets a 0 for each stage
that has succeeded. With any other exit code, or after a request to end, the process ends with its stage. Each stage
finds what a fresh process has: environment, output, signal handlers, number of threads, random state. The process group
stays, as vLLM has its own within it.
"""

import gc
import os
import random
import runpy
import signal
import sys
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch._dynamo  # before vLLM, which has it switched off on a CPU (`execution.compile` may need it)

from luffy.errors import EXIT_FAILURE
from luffy.library_loading import loaded
from luffy.pipeline.identity import read_code_again
from luffy.pipeline.warm_start import Order
from luffy.processes import MARK_VARIABLE, SUPERVISOR_VARIABLE, begin_stage, exit_without_finalizing
from luffy.rollout.kept_engine import keep_engine
from luffy.stages import program
from luffy.stop_request import STOP_SIGNALS, stop_is_requested
from luffy.training.ranks import init_process_group

_OF_GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


class StageHost:
    """Runs a stage as in a fresh process."""

    def __init__(self) -> None:
        self._own = {name: os.environ[name] for name in (MARK_VARIABLE, SUPERVISOR_VARIABLE)}
        self._num_threads = torch.get_num_threads()
        self._seed = torch.initial_seed()
        program.leave = sys.exit
        keep_engine()
        # Otherwise vLLM would begin one, and end it with its engine, also under a trainer.
        init_process_group()
        self._own |= {name: os.environ[name] for name in _OF_GROUP}

    def run(self, module: str, arguments: list[str], environment: dict[str, str], log: str) -> int:
        """The exit code of `python -m MODULE ARGUMENT ...`, with its output appended to `log`."""
        begin_stage()
        os.environ.clear()
        os.environ.update(environment | self._own)
        sys.stdout.flush()
        sys.stderr.flush()
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.close(sink)
        torch.set_num_threads(self._num_threads)
        torch.use_deterministic_algorithms(False)
        torch.manual_seed(self._seed)
        random.seed()
        np.random.seed()
        read_code_again()
        sys.argv[1:] = arguments
        sys.orig_argv = [sys.executable, "-m", module, *arguments]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else EXIT_FAILURE
        finally:
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
        return EXIT_FAILURE  # a stage's program ends by itself

    def tidy(self) -> None:
        """Free what the stage has left, but for the engine."""
        if (compiling := sys.modules.get("torch._inductor.async_compile")) is not None:
            compiling.shutdown_compile_workers()  # they have ended with the stage
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def serve(orders: Connection) -> None:
    """Run stages until one fails or the other end of the connection is closed."""
    loaded()
    host = StageHost()
    while True:
        try:
            order: Order = orders.recv()
        except EOFError:
            exit_without_finalizing(0)
        code = host.run(*order)
        if code or stop_is_requested():
            exit_without_finalizing(code)
        host.tidy()
        orders.send(0)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

"""CPU seconds of loading Prefect's server, a flow, the programs of two stages, and vLLM, where it is installed, with
garbage collection and without.

Run: python tests/benchmarks/library_loading.py [rounds]

Each import is a process of its own; the table shows the fastest of the rounds (3).
"""

import subprocess
import sys
from importlib.util import find_spec

from measuring import numbers, show

MODULES = ("prefect.server.api.server", "luffy.flows.full_pipeline", "luffy.stages.prepare_data", "luffy.stages.rl")
VLLM = "vllm.v1.engine.llm_engine"
CODE = """
import importlib, sys, time
from contextlib import nullcontext
from luffy.library_loading import without_collections
began = time.process_time()
with without_collections() if sys.argv[2] == "without" else nullcontext():
    importlib.import_module(sys.argv[1])
print(time.process_time() - began)
"""


def seconds(module: str, how: str) -> float:
    """Of the CPU, for one import in a new process."""
    command = [sys.executable, "-c", CODE, module, how]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(said.splitlines()[-1])


def main() -> None:
    """Print one line a module."""
    (rounds,), rows = numbers(3), []
    for module in (*MODULES, VLLM) if find_spec("vllm") else MODULES:
        took = [(seconds(module, "with"), seconds(module, "without")) for _ in range(rounds)]
        rows.append((module, *(f"{min(column):.2f} s" for column in zip(*took, strict=True))))
    show(("module", "with collections", "without"), rows)


if __name__ == "__main__":
    main()

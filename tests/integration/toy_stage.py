"""A stage program that trains nothing: `python toy_stage.py STAGE --config FILE --out DIR`; TOY_* say how."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from luffy.errors import DataError, LostError
from luffy.stages.program import StageContext, StageResult, run_program

CHILD = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(7200)"

HOURS_S = 7200.0


def run(settings: object, context: StageContext) -> StageResult:
    behave(os.environ.get("TOY_MODE", ""))
    fault = os.environ.get(f"TOY_FAULT_{sys.argv[1].upper()}", os.environ.get("TOY_FAULT", ""))
    first = max((int(path.name[5:]) for path in (context.out / "checkpoints").glob("step_*")), default=0)
    total = int(os.environ.get("TOY_STEPS", "3"))
    for step in range(first + 1, total + 1):
        context.events.progress(step, total, loss=1.0 / step)
        time.sleep(
            HOURS_S if step == int(os.environ.get("TOY_HANGS_AT", "0")) else float(os.environ.get("TOY_STEP_S", "0"))
        )
        checkpoint = context.out / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMPLETE").touch()
        if fault and (step == 2 or fault == "lost for good"):
            strike(fault)
        if os.environ.get("TOY_MODE") == "quota" and step == 2:
            use_up_quota()
    (context.out / "model").mkdir(exist_ok=True)
    (context.out / "model" / "weights").write_text(os.environ.get("TOY_WEIGHTS", "same"))
    (context.out / "metrics.jsonl").write_text(f'{{"pid": {os.getpid()}}}\n')
    (context.out / "shards").mkdir(exist_ok=True)
    return StageResult(("model", "metrics.jsonl"), {"loss": 0.5}, resumed_from=first, scratch=("shards",))


def use_up_quota() -> None:
    """Neither the log nor the events can be written any more, although the disk has room."""
    full = os.open("/dev/full", os.O_WRONLY)
    for link in Path("/proc/self/fd").iterdir():
        if link.exists() and link.readlink().name in ("log.txt", "events.jsonl"):
            os.dup2(full, int(link.name))
    os.write(full, b"a checkpoint")


def behave(mode: str) -> None:
    if mode == "mistake":
        raise DataError("train.jsonl:3: prompt: missing; add it")
    if mode == "crash":
        raise RuntimeError("the matrix is not finite")
    if mode == "family":  # a child in a session of its own that does not listen
        child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
        sys.stderr.write(f"child {child.pid}\n")
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def strike(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crash":
        raise RuntimeError("the matrix is not finite")
    raise LostError("http://host:8000: no answer")


if __name__ == "__main__":
    stage = sys.argv[1]
    sys.exit(run_program(stage, run, sys.argv[2:]))

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


def run(settings: object, context: StageContext) -> StageResult:
    toy = {name.removeprefix("TOY_"): value for name, value in os.environ.items() if name.startswith("TOY_")}
    mode, fault = toy.get("MODE", ""), toy.get(f"FAULT_{sys.argv[1].upper()}", toy.get("FAULT", ""))
    misbehave(mode)
    first = max((int(path.name[5:]) for path in (context.out / "checkpoints").glob("step_*")), default=0)
    total = int(toy.get("STEPS", "3"))
    for step in range(first + 1, total + 1):
        context.events.progress(step, total, loss=1.0 / step)
        time.sleep(7200.0 if str(step) == toy.get("HANGS_AT") else float(toy.get("STEP_S", "0")))
        checkpoint = context.out / "checkpoints" / f"step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMPLETE").touch()
        if step == 2 or fault == "lost for good":
            misbehave(fault)
        if step == 2 and mode == "quota":
            use_up_quota()
    for folder in ("model", "shards"):
        (context.out / folder).mkdir(exist_ok=True)
    (context.out / "model" / "weights").write_text(toy.get("WEIGHTS", "same"))
    (context.out / "metrics.jsonl").write_text(f'{{"pid": {os.getpid()}}}\n')
    return StageResult(("model", "metrics.jsonl"), {"loss": 0.5}, resumed_from=first, scratch=("shards",))


def use_up_quota() -> None:
    """Neither the log nor the events can be written any more, although the disk has room."""
    full = os.open("/dev/full", os.O_WRONLY)
    for link in Path("/proc/self/fd").iterdir():
        if link.exists() and link.readlink().name in ("log.txt", "events.jsonl"):
            os.dup2(full, int(link.name))
    os.write(full, b"a checkpoint")


def misbehave(how: str) -> None:
    if how == "mistake":
        raise DataError("train.jsonl:3: prompt: missing; add it")
    if how == "crash":
        raise RuntimeError("the matrix is not finite")
    if how in ("lost", "lost for good"):
        raise LostError("http://host:8000: no answer")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "family":  # a child in a session of its own that does not listen
        child = subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
        sys.stderr.write(f"child {child.pid}\n")


if __name__ == "__main__":
    stage = sys.argv[1]
    sys.exit(run_program(stage, run, sys.argv[2:]))

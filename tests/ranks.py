"""Programs of tests/distributed on several ranks of this machine, started by torchrun."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
# The address is given, since torchrun would look this machine's own name up.
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1")


def on_ranks(worker: str, *arguments: object, ranks: int = 2) -> Any:
    """What rank 0 of tests/distributed/`worker` prints after `RESULT `; arguments other than texts are JSON."""
    script = str(ROOT / "tests" / "distributed" / worker)
    done = torchrun(ranks, script, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def torchrun(ranks: int, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The ended program; one that takes too long fails, and none of its ranks is left."""
    given = [one if isinstance(one, str) else json.dumps(one, default=str) for one in arguments]
    command = [*_TORCHRUN, "--nproc-per-node", str(ranks), script, *given]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        out, err = launcher.communicate(timeout=PATIENCE_S)
    finally:
        if launcher.poll() is None:
            # Ranks have sessions of their own and would outlive the launcher.
            for process in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
                process.kill()
    return subprocess.CompletedProcess(command, launcher.returncode, out, err)

"""Where a bench works: a folder that goes with it, also when it was killed."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from luffy.costs.bench_run import scratch_folder
from luffy.pipeline.workspace import Workspace


def test_the_folder_goes_at_the_end_and_so_do_those_of_killed_benches(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = socket.gethostname()
    killed = tmp_path / "benches" / f".scratch-{dead.pid}@{here}-left"
    living = tmp_path / "benches" / f".scratch-{os.getpid()}@{here}-other"
    elsewhere = [tmp_path / "benches" / f".scratch-{dead.pid}@{host}-other" for host in ("driver", f"{here}-2")]
    for folder in (killed, living, *elsewhere):
        (folder / "rl").mkdir(parents=True)
    with scratch_folder(Workspace(tmp_path)) as scratch:
        (scratch / "sft").mkdir()
        assert not killed.exists()
    assert {*(tmp_path / "benches").iterdir()} == {living, *elsewhere}

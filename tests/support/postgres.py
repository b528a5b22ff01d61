"""A PostgreSQL of one's own for a test, from the programs of Debian's package."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name), default=None)
"""The folder of `initdb` and `pg_ctl`; None: not installed."""


@contextmanager
def postgresql(password: str = "") -> Iterator[str]:
    """Prefect's connection URL of a new, empty server, which takes any password. As root it belongs to `postgres`."""
    assert PROGRAMS is not None
    folder = Path(tempfile.mkdtemp())
    owner = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    if owner:
        shutil.chown(folder, "postgres")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def call(program: str, *arguments: str | Path) -> None:
        assert PROGRAMS is not None
        command = [*owner, PROGRAMS / program, "-D", folder / "data", *arguments]
        subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)

    try:
        call("initdb", "-U", "prefect", "--auth=trust")
        options = f"-p {port} -c listen_addresses=127.0.0.1 -k {folder}"
        call("pg_ctl", "-w", "-l", folder / "log", "-o", options, "start")
        try:
            yield f"postgresql+asyncpg://prefect:{password}@127.0.0.1:{port}/postgres"
        finally:
            call("pg_ctl", "-w", "-m", "fast", "stop")
    finally:
        shutil.rmtree(folder)

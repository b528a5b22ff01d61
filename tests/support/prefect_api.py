"""One Prefect server for the flows of a test session, which each take seconds to start their own; its empty database.

Tests of what a flow's own server does, and of how flows die, leave it alone.
"""

import atexit
import functools
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from filelock import FileLock

from luffy.flows.prefect_api import ApiServer, answers
from support.patience import PATIENCE_S


def shared_api() -> Mapping[str, str]:
    """What a flow's environment needs to report to the shared server."""
    return {"PREFECT_API_URL": _server()}


def place_empty_database(home: Path) -> None:
    """Put what a server makes at its first start into `home`, whose first start then takes 10 seconds less."""
    _server()
    shutil.copytree(_folder() / "empty", home)


@functools.cache
def _folder() -> Path:
    """The same for all processes of a session of pytest-xdist."""
    if session := os.environ.get("PYTEST_XDIST_TESTRUNUID"):
        folder = Path(tempfile.gettempdir(), f"prefect-{session}")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
    return Path(tempfile.mkdtemp(prefix="prefect-"))


@functools.cache
def _server() -> str:
    """The address of the server. It ends with the process that has needed it first.

    Processes of pytest-xdist end when no test of the session is left.
    """
    record = _folder() / "url"
    with FileLock(_folder() / "lock"):
        if not record.exists() or not answers(record.read_text(), PATIENCE_S):
            record.write_text(_start().url)
    return record.read_text()


def _start() -> ApiServer:
    home, empty = _folder() / "home", _folder() / "empty"
    server = ApiServer(home)
    server.wait()
    if not empty.exists():
        empty.mkdir()
        with (
            closing(sqlite3.connect(home / "prefect.db")) as filled,
            closing(sqlite3.connect(empty / "prefect.db")) as emptied,
        ):
            filled.backup(emptied)
    atexit.register(shutil.rmtree, _folder(), ignore_errors=True)
    atexit.register(server.stop)
    return server


def without_prefect() -> dict[str, str]:
    """The environment of this process without what it says about Prefect."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}

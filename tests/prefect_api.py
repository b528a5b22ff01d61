"""One Prefect server for the flows of a test process, which each take seconds to start their own; its empty database.

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

from luffy.flows.prefect_session import ApiServer


def shared_api() -> Mapping[str, str]:
    """What a flow's environment needs to report to the shared server."""
    return {"PREFECT_API_URL": _server().url}


def place_empty_database(home: Path) -> None:
    """Put what a server makes at its first start into `home`, whose first start then takes 10 seconds less."""
    _server()
    shutil.copytree(_folder() / "empty", home)


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="prefect-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def _server() -> ApiServer:
    server = ApiServer(_folder() / "home")
    server.wait()
    (_folder() / "empty").mkdir()
    shutil.copy(_folder() / "home" / "prefect.version", _folder() / "empty")
    with (
        closing(sqlite3.connect(_folder() / "home" / "prefect.db")) as filled,
        closing(sqlite3.connect(_folder() / "empty" / "prefect.db")) as empty,
    ):
        filled.backup(empty)
    atexit.register(server.stop)
    return server


def without_prefect() -> dict[str, str]:
    """The environment of this process without what it says about Prefect."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}

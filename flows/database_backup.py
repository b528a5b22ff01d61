"""A copy of Prefect's SQLite database before another version of Prefect migrates it, which cannot be undone."""

import importlib.metadata
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

from luffy.errors import UserError
from luffy.files import write_atomic
from luffy.pipeline.workspace.disk import free_bytes

_DATABASE, _OPENED_BY = "prefect.db", "prefect.version"
_OTHER_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


def back_up_before_upgrade(home: Path) -> None:
    """Copy the database in `home` if another version of Prefect opened it last; nothing for a database elsewhere.

    To be called before the server starts. Raises UserError where the disk has no room for the copy.
    """
    database, version = home / _DATABASE, installed_version()
    if os.environ.get(_OTHER_DATABASE) or not database.exists() or opened_by(home) == version:
        return
    copy = home / f"{_DATABASE}.before-{version}"
    if not copy.exists():
        _copy(database, copy)
        sys.stderr.write(f"note: Prefect {version} updates its database; as it was: {copy}\n")


def note_opened(home: Path) -> None:
    """Remember that the installed version of Prefect has opened the database."""
    if opened_by(home) != installed_version():
        write_atomic(home / _OPENED_BY, installed_version())


def opened_by(home: Path) -> str | None:
    """The version of Prefect that opened the database last; None where that is unknown."""
    file = home / _OPENED_BY
    return file.read_text(encoding="utf-8").strip() if file.exists() else None


def installed_version() -> str:
    """The version of Prefect in this environment."""
    return importlib.metadata.version("prefect")


def _copy(database: Path, copy: Path) -> None:
    size = database.stat().st_size
    if free_bytes(database) < 2 * size:  # migrations may rewrite tables as well
        raise UserError(
            f"{database}: Prefect {installed_version()} has to update it, and the disk has no room for a copy of "
            f"{size >> 20} MiB; free space (luffy gc lists what to delete)"
        )
    # By SQLite, which takes along what is still in the write-ahead log; under another name until it is whole.
    partial = copy.with_name(f".{copy.name}")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(partial)) as target:
        source.backup(target)
    partial.replace(copy)

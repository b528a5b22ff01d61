"""A copy of Prefect's SQLite database before another version of Prefect migrates it, which cannot be undone."""

import importlib.metadata
import os
import sqlite3
import sys
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path

from luffy.errors import UserError
from luffy.files import write_atomic
from luffy.pipeline.workspace.disk import free_bytes

_DATABASE, _OPENED_BY, _COPIED_FOR = "prefect.db", "prefect.version", "prefect.copied_for"
_OTHER_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


def back_up_before_upgrade(home: Path) -> None:
    """Copy the database in `home` if another version of Prefect opened it last; nothing for a database elsewhere.

    To be called before the server starts. An update that failed half way is tried again without another copy. Raises
    UserError where the disk has no room for the copy, or the database cannot be read.
    """
    database, version = home / _DATABASE, installed_version()
    if os.environ.get(_OTHER_DATABASE) or not database.exists():
        return
    try:
        if _state(database) == _read(home / _OPENED_BY) or _read(home / _COPIED_FOR) == version:
            return
        copy = home / f"{_DATABASE}.before-{version}-{datetime.now():%Y%m%d-%H%M%S}"
        _copy(database, copy)
    except sqlite3.Error as error:
        raise UserError(f"{database}: cannot be copied before Prefect {version} updates it: {error}") from error
    write_atomic(home / _COPIED_FOR, version)
    sys.stderr.write(f"note: Prefect {version} updates its database; as it was: {copy}\n")


def note_opened(home: Path) -> None:
    """Remember that the installed version of Prefect has opened the database."""
    (home / _COPIED_FOR).unlink(missing_ok=True)
    database = home / _DATABASE
    if os.environ.get(_OTHER_DATABASE) or not database.exists():
        return
    with suppress(sqlite3.Error):  # then the next start makes a copy that was not needed
        if (state := _state(database)) != _read(home / _OPENED_BY):
            write_atomic(home / _OPENED_BY, state)


def _state(database: Path) -> str:
    """The installed version, and the revision of the tables: an older copy that was put back has another."""
    with closing(sqlite3.connect(database)) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchall()
        revisions = connection.execute("SELECT version_num FROM alembic_version").fetchall() if tables else []
    return " ".join([installed_version(), *(str(revision) for (revision,) in revisions)])


def _read(file: Path) -> str | None:
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
    partial = copy.with_name(f".{_DATABASE}.partial")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(partial)) as target:
        source.backup(target)
    partial.replace(copy)

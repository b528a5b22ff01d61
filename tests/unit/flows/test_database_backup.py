"""Prefect's database is copied once before another version of Prefect migrates it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from luffy.errors import UserError
from luffy.flows.database_backup import back_up_before_upgrade, installed_version, note_opened


@pytest.fixture
def home(tmp_path):
    """A database with a row that is still in the write-ahead log."""
    with closing(sqlite3.connect(tmp_path / "prefect.db", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE runs (name)")
        database.execute("INSERT INTO runs VALUES ('old')")
        yield tmp_path


def copies(home):
    return list(home.glob("*prefect.db.before-*"))


def test_a_database_of_an_unknown_version_is_copied_whole_and_once(home, capsys):
    back_up_before_upgrade(home)
    (copy,) = copies(home)
    with closing(sqlite3.connect(copy)) as database:
        assert database.execute("SELECT name FROM runs").fetchall() == [("old",)]
    assert capsys.readouterr().err.count("\n") == 1
    before = copy.stat().st_mtime_ns
    back_up_before_upgrade(home)
    assert (copies(home), copy.stat().st_mtime_ns, capsys.readouterr().err) == ([copy], before, "")


def test_a_database_of_another_version_is_copied_and_one_of_this_version_is_not(home):
    note_opened(home)
    back_up_before_upgrade(home)
    assert copies(home) == []
    (home / "prefect.version").write_text("3.4.25")
    back_up_before_upgrade(home)
    (copy,) = copies(home)
    assert copy.name.startswith(f"prefect.db.before-{installed_version()}-")


def test_a_copy_that_was_put_back_is_copied_again_before_the_next_update(home):
    """Between the two, an older luffy that knows nothing of copies may have worked with it."""
    with closing(sqlite3.connect(home / "prefect.db", isolation_level=None)) as database:
        database.execute("CREATE TABLE alembic_version (version_num)")
        database.execute("INSERT INTO alembic_version VALUES ('new')")
        note_opened(home)
        back_up_before_upgrade(home)
        assert copies(home) == []
        database.execute("UPDATE alembic_version SET version_num = 'old'")
        back_up_before_upgrade(home)
    assert len(copies(home)) == 1


def test_what_a_killed_copy_left_goes_with_the_next_one(home, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            back_up_before_upgrade(home)
    assert list(home.glob(".prefect.db*"))
    back_up_before_upgrade(home)
    assert len(copies(home)) == 1
    assert not list(home.glob(".prefect.db*"))


def test_a_damaged_database_is_one_line(home):
    (home / "prefect.db").write_bytes(b"no database" * 1000)
    (home / "prefect.db-wal").unlink()
    with pytest.raises(UserError, match=r"prefect\.db: cannot be copied before Prefect .* updates it: file is not a"):
        back_up_before_upgrade(home)


def test_a_new_database_and_one_elsewhere_are_not_copied(home, tmp_path_factory, monkeypatch):
    back_up_before_upgrade(tmp_path_factory.mktemp("new"))
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://localhost/prefect")
    back_up_before_upgrade(home)
    assert copies(home) == []

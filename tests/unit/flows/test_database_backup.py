"""Prefect's database is copied once before another version of Prefect migrates it."""

import sqlite3
from contextlib import closing

import pytest

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
    assert [copy.name for copy in copies(home)] == [f"prefect.db.before-{installed_version()}"]


def test_a_new_database_and_one_elsewhere_are_not_copied(home, tmp_path_factory, monkeypatch):
    back_up_before_upgrade(tmp_path_factory.mktemp("new"))
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://localhost/prefect")
    back_up_before_upgrade(home)
    assert copies(home) == []

"""Transactions of the server over SQLite, by Prefect's own classes."""

import asyncio
import sqlite3
from contextlib import closing

import pytest
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy import text

from luffy.flows.prefect_server import begin_sqlite_transactions_at_once


@pytest.fixture
def database(tmp_path, monkeypatch):
    monkeypatch.setattr(AioSqliteConfiguration, "begin_transaction", AioSqliteConfiguration.begin_transaction)
    begin_sqlite_transactions_at_once()
    return AioSqliteConfiguration(f"sqlite+aiosqlite:///{tmp_path}/prefect.db", timeout=1.0)


def can_write(path):
    with closing(sqlite3.connect(path, timeout=0)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
    return True


def test_a_transaction_has_the_lock_for_writing_from_its_beginning_to_its_end(database, tmp_path):
    async def begin():
        async with await database.session(await database.engine()) as session, database.begin_transaction(session):
            return can_write(tmp_path / "prefect.db")

    assert not asyncio.run(begin())
    assert can_write(tmp_path / "prefect.db")


def test_what_reads_inside_a_transaction_without_being_it_waits_for_no_lock(database):
    """Prefect reads an automation this way, in a thread, while its event loop and other transactions stand still."""

    async def read():
        async with await database.session(await database.engine()) as session:
            return (await session.execute(text("SELECT 1"))).scalar()

    async def begin_and_read():
        async with await database.session(await database.engine()) as session, database.begin_transaction(session):
            await session.execute(text("SELECT 1"))
            return await asyncio.to_thread(asyncio.run, read())

    assert asyncio.run(begin_and_read()) == 1

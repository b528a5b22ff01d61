"""Transactions of the server over SQLite, by Prefect's own classes."""

import asyncio
import sqlite3
from contextlib import closing
from types import SimpleNamespace

import pytest
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.events import triggers
from prefect.server.events.models import automations
from sqlalchemy import text

from luffy.flows.prefect_server import begin_sqlite_transactions_at_once, load_changed_automations_in_the_loop


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
    """Threads and tasks that are started within a transaction take its context along."""

    async def read():
        async with await database.session(await database.engine()) as session:
            return (await session.execute(text("SELECT 1"))).scalar()

    async def begin_and_read():
        async with await database.session(await database.engine()) as session, database.begin_transaction(session):
            await session.execute(text("SELECT 1"))
            return await asyncio.to_thread(asyncio.run, read())

    assert asyncio.run(begin_and_read()) == 1


def test_an_automation_is_stored_while_a_task_of_the_server_holds_the_lock_of_the_loaded_ones(database, monkeypatch):
    monkeypatch.setattr(automations, "run_coro_as_sync", automations.run_coro_as_sync)
    monkeypatch.setattr(triggers, "__automations_lock", None)  # of this test's loop
    load_changed_automations_in_the_loop()
    told = []

    async def changed(automation, event):
        async with triggers._automations_lock():
            told.append((automation, event))

    monkeypatch.setattr(triggers, "automation_changed", changed)

    async def store():
        async with triggers._automations_lock():
            async with await database.session(await database.engine()) as session, database.begin_transaction(session):
                await automations._notify(session, SimpleNamespace(id="one"), "created")
            assert told == []
        await asyncio.sleep(0.1)

    asyncio.run(store())
    assert told == [("one", "automation__created")]

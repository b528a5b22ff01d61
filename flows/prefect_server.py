"""Prefect's server as luffy starts it: `uvicorn --factory luffy.flows.prefect_server:create_app`.

It refuses requests from other servers' pages (`own_pages`), and its SQLite transactions begin as IMMEDIATE. Prefect
begins most of them as DEFERRED: one that reads first and writes later fails at once with "database is locked" when
another one has written in between, and SQLite's timeout does not apply to it. An IMMEDIATE one waits for its turn.
Changed automations are loaded without stopping the server (`load_changed_automations_in_the_loop`).
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from luffy.flows.own_pages import Application, OwnPages, ServerNames
from luffy.library_loading import without_collections

if TYPE_CHECKING:
    from prefect.server.database.configurations import AioSqliteConfiguration
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction

NAMES_VARIABLE = "LUFFY_SERVER_NAMES"
"""Names under which the server may be called, separated by commas."""


def create_app() -> Application:
    """The application; Prefect's settings come from the environment."""
    with without_collections():
        begin_sqlite_transactions_at_once()
        load_changed_automations_in_the_loop()
        from prefect.server.api.server import create_app as create_prefect_app

    return OwnPages(create_prefect_app(), ServerNames.of(os.environ.get(NAMES_VARIABLE, "").split(",")))


def begin_sqlite_transactions_at_once() -> None:
    """Have every transaction over SQLite take the lock for writing at its beginning (Prefect 3.7)."""
    from prefect.server.database.configurations import SQLITE_BEGIN_MODE, AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    @asynccontextmanager
    async def begin_at_once(
        self: "AioSqliteConfiguration", session: "AsyncSession", with_for_update: bool = False
    ) -> "AsyncGenerator[AsyncSessionTransaction, None]":
        async with begin(self, session, with_for_update=False) as transaction:
            # For this BEGIN alone: tasks that are started within the transaction would inherit the mode.
            mode = SQLITE_BEGIN_MODE.set("IMMEDIATE")
            try:
                await session.connection()
            finally:
                SQLITE_BEGIN_MODE.reset(mode)
            yield transaction

    AioSqliteConfiguration.begin_transaction = begin_at_once  # type: ignore[method-assign]


def load_changed_automations_in_the_loop() -> None:
    """Have a task of the event loop load an automation that was just stored (Prefect 3.7, over SQLite).

    Prefect stops its loop until another thread has loaded it. That thread waits for the lock of the loaded automations:
    forever, if a task of the stopped loop holds it, as one does every few seconds.
    """
    from prefect.server.events.models import automations

    loading: set[asyncio.Task[None]] = set()  # the loop itself keeps no reference to its tasks

    def load_soon(load: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(load)
        loading.add(task)
        task.add_done_callback(loading.discard)

    automations.run_coro_as_sync = load_soon  # type: ignore[assignment]

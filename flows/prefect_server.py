"""Prefect's API server as luffy starts it: `uvicorn --factory luffy.flows.prefect_server:create_app`.

Over SQLite, Prefect begins most transactions as DEFERRED. Such a transaction that reads first and writes later fails at
once with "database is locked" when another one has written in between; SQLite's timeout does not apply to it. Begun as
IMMEDIATE, it waits for its turn.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prefect.server.database.configurations import AioSqliteConfiguration
    from sqlalchemy.ext.asyncio import AsyncSession, AsyncSessionTransaction


def create_app() -> "FastAPI":
    """The application that serves Prefect's API."""
    begin_sqlite_transactions_at_once()
    from prefect.server.api.server import create_app as create_prefect_app

    return create_prefect_app()


def begin_sqlite_transactions_at_once() -> None:
    """Have every transaction over SQLite take the lock for writing at its beginning (Prefect 3.7)."""
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    @asynccontextmanager
    async def begin_at_once(
        self: "AioSqliteConfiguration", session: "AsyncSession", with_for_update: bool = False
    ) -> "AsyncGenerator[AsyncSessionTransaction, None]":
        async with begin(self, session, with_for_update=True) as transaction:
            yield transaction

    AioSqliteConfiguration.begin_transaction = begin_at_once  # type: ignore[method-assign]

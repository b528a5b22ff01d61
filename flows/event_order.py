"""The order in which luffy's Prefect server reacts to events: an event of an earlier server is not waited for.

Prefect holds a run's change of state back until it has reacted to the change before it, if that was less than five
minutes ago. It remembers in memory what it has reacted to, so a server that was killed and started again would report
the runs that died with it a quarter of an hour late. PREFECT_SERVER_EVENTS_CAUSAL_ORDERING names this module.
"""

from datetime import UTC, datetime
from uuid import UUID

import sqlalchemy
from prefect.server.database import provide_database_interface
from prefect.server.events.ordering import EventArrivedEarly, memory
from prefect.server.events.schemas.events import ReceivedEvent

_STARTED = datetime.now(UTC)


class CausalOrdering(memory.CausalOrdering):
    """Prefect's order, in which events that were in the database when this server started count as seen."""

    async def wait_for_leader(self, event: ReceivedEvent) -> None:
        try:
            await super().wait_for_leader(event)
        except EventArrivedEarly:
            if event.follows is None or not await _came_before_the_start(event.follows):
                raise
            await self.forget_follower(event)


async def _came_before_the_start(event: UUID) -> bool:
    database = provide_database_interface()
    async with database.session_context() as session:
        received = await session.scalar(sqlalchemy.select(database.Event.received).where(database.Event.id == event))
    return received is not None and received < _STARTED

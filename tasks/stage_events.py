"""Events of a running stage on Prefect's server, for automations: `luffy.stage.progress`, `luffy.stage.ended`, alarms.

Prefect's own thread sends them. If no server responds they are lost, and the run neither waits nor fails.
"""

import time
from collections.abc import Callable
from typing import Literal

from prefect.events import Event, emit_event

from luffy.cli.progress import StageLine
from luffy.tasks.alarms import Alarm, event_of

_PROGRESS_INTERVAL_S = 30.0
Outcome = Literal["finished", "reused", "failed"]


class StageEvents:
    """Emits the events of one stage; to be made inside its task, whose flow run they are related to.

    Their resource is `luffy.stage.<key>`, with the key of the stage: after a kill, the next run that resumes the stage
    continues the same series.
    """

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._next_s = -float("inf")
        self._last: Event | None = None

    def progressed(self, key: str, line: StageLine) -> None:
        """Emit `luffy.stage.progress`, unless less than half a minute has passed since the last one."""
        if (now := self._clock()) >= self._next_s:
            self._next_s = now + _PROGRESS_INTERVAL_S
            self._emit("luffy.stage.progress", key, line, {})

    def ended(self, key: str, line: StageLine, outcome: Outcome) -> None:
        """Emit `luffy.stage.ended`, always."""
        self._emit("luffy.stage.ended", key, line, {"outcome": outcome})

    def alarmed(self, key: str, line: StageLine, alarm: Alarm) -> None:
        """Emit the event of the alarm's kind."""
        self._emit(event_of(alarm.kind), key, line, {"text": alarm.text})

    def _emit(self, event: str, key: str, line: StageLine, more: dict[str, str]) -> None:
        payload = {"stage": line.name, "run": self._run, "step": line.step, "total": line.total, **more}
        resource = {"prefect.resource.id": f"luffy.stage.{key}", "prefect.resource.name": line.name}
        # The server evaluates events concurrently: without the order, an end could be seen before the last progress.
        # The call only queues the event, and logs its own errors.
        self._last = emit_event(event, resource, payload=payload, follows=self._last)

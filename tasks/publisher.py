"""A background thread that writes artifacts to the Prefect API.

Prefect is only a view: a slow, faulty or missing API costs artifacts, never a run. `offer` returns at once. A newer
artifact replaces one that is still unwritten, and after an expensive one the thread rests, so that all of them together
use less than 2 % of one core.
"""

import contextvars
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol
from uuid import UUID

from luffy.tasks.artifacts import Artifact
from luffy.tasks.prefect_faults import tolerating_prefect

_MAX_SHARE = 0.02
"""Share of one core that publishing may use."""
_PAUSE_AFTER_FAILURE_S = 30.0
_CLOSE_S = 5.0


class ArtifactWriter(Protocol):
    """Destination of artifacts."""

    def create(self, slot: "Slot", artifact: Artifact) -> UUID: ...
    def update(self, identifier: UUID, artifact: Artifact) -> None: ...


@dataclass(frozen=True, slots=True)
class Slot:
    """One artifact of one task run, created once and then updated."""

    task_run: UUID
    key: str


@dataclass(slots=True)
class _ArtifactPlace:
    """State of a slot."""

    make: Callable[[], Artifact | None] | None = None
    """The newest content that is still unwritten; None: all is written."""
    due: float = 0.0
    every_s: float = 0.0
    identifier: UUID | None = None


@dataclass(slots=True)
class Cost:
    """Cost of publishing so far."""

    written: int = 0
    failed: int = 0
    cpu_s: float = 0.0


class Publisher:
    """Context manager; on exit, pending artifacts have five seconds."""

    def __init__(self, writer: ArtifactWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._writer = writer
        self._clock = clock
        self._places: dict[Slot, _ArtifactPlace] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._resting_until = 0.0
        self.cost = Cost()
        # In this thread's context, which holds Prefect's settings.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._work), name="artifacts", daemon=True)

    def __enter__(self) -> "Publisher":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def offer(self, slot: Slot, make: Callable[[], Artifact | None], *, every_s: float = 0.0) -> None:
        """Write the result of `make`, called in the publisher's thread, at most once in `every_s` (0: at once)."""
        with self._changed:
            place = self._places.setdefault(slot, _ArtifactPlace())
            place.make, place.every_s = make, every_s
            if not every_s:
                place.due = 0.0
            self._changed.notify()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            slot, place, make = found
            began = time.thread_time()
            with tolerating_prefect(f"the artifact {slot.key} could not be written") as faults:
                self._write(slot, place, make)
            if faults:
                self.cost.failed += 1
                self._resting_until = self._clock() + _PAUSE_AFTER_FAILURE_S
                self._keep_for_later(place, make)
            spent, now = time.thread_time() - began, self._clock()
            self.cost.cpu_s += spent
            place.due = now + place.every_s
            self._resting_until = max(self._resting_until, now + spent / _MAX_SHARE)

    def _keep_for_later(self, place: _ArtifactPlace, make: Callable[[], Artifact | None]) -> None:
        """Retry later unless there is a newer one: a stage's last artifact must survive a hiccup of the API."""
        with self._changed:
            if place.make is None and not self._closing:
                place.make = make

    def _write(self, slot: Slot, place: _ArtifactPlace, make: Callable[[], Artifact | None]) -> None:
        artifact = make()
        if artifact is None:
            return
        if place.identifier is None:
            place.identifier = self._writer.create(slot, artifact)
        else:
            self._writer.update(place.identifier, artifact)
        self.cost.written += 1

    def _next(self) -> tuple[Slot, _ArtifactPlace, Callable[[], Artifact | None]] | None:
        """Wait for the next artifact that is due; None at the end."""
        with self._changed:
            while True:
                waiting = [(slot, place) for slot, place in self._places.items() if place.make is not None]
                if not waiting:
                    if self._closing:
                        return None
                    self._changed.wait()
                    continue
                slot, place = min(waiting, key=lambda found: found[1].due)
                wait = max(place.due, self._resting_until) - self._clock()
                if wait > 0 and not self._closing:
                    self._changed.wait(wait)
                    continue
                make, place.make = place.make, None
                assert make is not None
                return slot, place, make

"""The state of each stage of a running chain, in numbers and words; `console` displays it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from luffy.errors import StageFailed
from luffy.pipeline.events import Event
from luffy.pipeline.manifest import Manifest
from luffy.pipeline.plan import StagePlan

StageState = Literal["pending", "starting", "waiting", "running", "finished", "reused", "failed", "interrupted"]
_SHOWN_METRICS = ("loss", "reward", "tokens_per_s")


@dataclass(slots=True)
class StageLine:
    """One stage of the display."""

    name: str
    state: StageState = "pending"
    note: str = ""
    news: str = ""
    """The last message, until the next progress: what a running stage waits for, say."""
    step: int = 0
    total: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    began: float | None = None
    ended: float | None = None
    _first_step: int = 0
    _first_time: float | None = None
    _last_time: float = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time left at the pace of this attempt; None while there is no pace."""
        done = self.step - self._first_step
        if self._first_time is None or done <= 0 or not self.total:
            return None
        return (self._last_time - self._first_time) / done * (self.total - self.step)

    @property
    def percent(self) -> float:
        """Estimate for the steps that are left."""
        return 100.0 * self.step / self.total if self.total else 0.0

    def seconds(self, now: float) -> float | None:
        """Time spent on the stage so far; None before it starts."""
        return None if self.began is None else (self.ended or now) - self.began

    def take(self, event: Event) -> None:
        """Update from an event of the stage program."""
        match event.kind:
            case "started":
                self.state, self.note = "running", event.text
            case "waiting":
                self.state, self.note = "waiting", f"waiting for {event.text}"
            case "message":
                self.note = self.news = event.text
            case "progress":
                self._advance(event)

    def _advance(self, event: Event) -> None:
        if self._first_time is None:
            self._first_step, self._first_time = event.step, event.time
        self.news = ""
        self.step, self.total, self._last_time = event.step, event.total, event.time
        self.metrics |= {name: event.metrics[name] for name in _SHOWN_METRICS if name in event.metrics}


class ChainProgress:
    """The lines of all stages; a `StageObserver` that only keeps state."""

    def __init__(self, names: list[str], clock: Callable[[], float] = time.time) -> None:
        self.lines = {name: StageLine(name) for name in names}
        self._clock = clock

    def planned(self, plan: StagePlan) -> None:
        line = self.lines[plan.node.name]
        line.began = self._clock()
        line.state = "starting"
        line.note = f"{plan.headline}: {plan.reason}" if plan.reason else plan.headline

    def event(self, plan: StagePlan, event: Event) -> None:
        self.lines[plan.node.name].take(event)

    def line(self, plan: StagePlan, text: str) -> None:
        """Log lines stay in the log."""

    def finished(self, plan: StagePlan, manifest: Manifest) -> None:
        line = self.lines[plan.node.name]
        line.ended = self._clock()
        line.state = "reused" if plan.action == "reuse" else "finished"
        line.note = plan.identity.key

    def failed(self, plan: StagePlan, error: BaseException) -> None:
        line = self.lines[plan.node.name]
        line.ended = self._clock()
        interrupted = isinstance(error, StageFailed) and error.is_interruption
        line.state = "failed" if isinstance(error, Exception) and not interrupted else "interrupted"
        line.note = plan.identity.key

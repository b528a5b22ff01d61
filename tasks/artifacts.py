"""The page of a stage in the Prefect UI, made from the files in its directory, and its way there.

The same function serves running, finished and reused stages. This module does not use Prefect: whoever makes a
`Publisher` gives it a function that writes.
"""

import contextvars
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from luffy.config import STAGE_KINDS
from luffy.pipeline.plan import StagePlan
from luffy.report.cells import table
from luffy.report.curves import headline_charts, headlines_first
from luffy.report.figures import image_url, picture
from luffy.report.page import markdown_table
from luffy.tracking.metrics import METRICS_FILE, read_metrics, training_rows

logger = logging.getLogger(__name__)
_STEPS_BACK = 10
_MAX_PAGE = 200_000
_REST_S = 60.0
"""Between two rounds of writing."""
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Artifact:
    """A page in its present state."""

    text: str
    """Markdown."""
    description: str


def stage_page(plan: StagePlan) -> Artifact | None:
    """What a stage shows of what it has made; None while there is nothing."""
    return _written(plan) or _training(plan)


def _training(plan: StagePlan) -> Artifact | None:
    """A table of each metric now, some steps ago, and in the first step, and a picture of the headline curves."""
    rows = read_metrics(plan.directory / METRICS_FILE)
    if not (steps := training_rows(rows)):
        return None
    shown = {"now": steps[-1], "before": steps[max(len(steps) - 1 - _STEPS_BACK, 0)], "first": steps[0]}
    values = (
        (name, *(f"{row[name]:.4g}" if name in row else "" for row in shown.values()))
        for name in headlines_first(steps[-1])
    )
    newest = markdown_table(table(("metric", *shown), values))
    # As markdown, because the UI shows the whole URL next to an artifact of kind "image".
    curves = f"![{plan.node.name} over its steps]({image_url(picture(headline_charts(rows)))})"
    when = ", ".join(f"{words}: step {row['step']:g}" for words, row in shown.items())
    return Artifact(f"{newest}\n\n{curves}", f"Metrics of {plan.node.name} ({when})")


def _written(plan: StagePlan) -> Artifact | None:
    """What the stage has written for people, as text and tables, with the place of the page with the plots."""
    kind = STAGE_KINDS[plan.node.stage]
    path = plan.directory / kind.text
    if not kind.text or not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    page = plan.directory / kind.pages[0] if kind.pages else path.with_suffix(".html")
    head = f"With all plots, to open in a browser: `{page}`\n\n" if page.is_file() else ""
    cut = "" if len(text) <= _MAX_PAGE else f"\n\n(cut here; the rest is in {path})\n"
    return Artifact(f"{head}{text[:_MAX_PAGE]}{cut}", kind.title)


Writer = Callable[[UUID, str, Artifact, UUID | None], UUID]
"""Writes the artifact of a task run and a key in place of the one with that identifier, or a new one; returns its
identifier."""


class Publisher:
    """A background thread that writes pages to the Prefect API, each at first, once a minute and at the end, for which
    it has five seconds.

    Prefect is only a view: a slow, faulty or missing API costs pages, never a run. `offer` returns at once, and a newer
    page replaces one that is still unwritten.
    """

    def __init__(self, write: Writer) -> None:
        self._write = write
        self._offered: dict[tuple[UUID, str], Callable[[], Artifact | None]] = {}
        """The newest content of each page that is still unwritten."""
        self._identifiers: dict[tuple[UUID, str], UUID] = {}
        self._changed = threading.Condition()
        self._closing = False
        # In this thread's context, which holds Prefect's settings.
        work = partial(contextvars.copy_context().run, self._work)
        self._thread = threading.Thread(target=work, name="artifacts", daemon=True)

    def __enter__(self) -> "Publisher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)

    def offer(self, task_run: UUID, key: str, make: Callable[[], Artifact | None]) -> None:
        """Write the result of `make`, called in the publisher's thread, unless a newer one is offered before."""
        with self._changed:
            self._offered[task_run, key] = make
            self._changed.notify()

    def _work(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._offered or self._closing)
                offered, self._offered, is_last = self._offered, {}, self._closing
            for place, make in offered.items():
                try:
                    if (artifact := make()) is not None:
                        self._identifiers[place] = self._write(*place, artifact, self._identifiers.get(place))
                except Exception as error:  # Prefect's client, its server and the network in between raise anything
                    logger.debug("the artifact %s could not be written: %s", place[1], error, exc_info=True)
                    with self._changed:  # a stage's last page must survive a hiccup of the API
                        self._offered.setdefault(place, make)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, _REST_S)

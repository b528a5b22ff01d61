"""The artifacts of a stage in the Prefect UI, made from the files in its directory, and their way there.

A stage has two: its progress, which Prefect shows with the run alone, and a page, which is also in the list of all
artifacts. The same function serves running, finished and reused stages. This module does not use Prefect: whoever makes
a `Publisher` gives it a function that writes.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal
from uuid import UUID

from luffy.config import STAGE_KINDS
from luffy.config.stage_kinds import ViewName
from luffy.evaluation.sample_files import find_samples, read_samples_of
from luffy.markdown_text import code_span
from luffy.pipeline.plan import StagePlan
from luffy.report.cells import table
from luffy.report.curves import headline_charts, headlines_first
from luffy.report.figures import image_url, picture
from luffy.report.page import fenced, markdown_table
from luffy.tracking.metrics import METRICS_FILE, read_last_lines, read_metrics, training_rows
from luffy.tracking.tracker import SAMPLES_FILE

logger = logging.getLogger(__name__)
ArtifactKind = Literal["progress", "markdown"]
_STEPS_BACK = 10
_NUM_SAMPLES = 4
_MAX_TEXT = 4_000
_MAX_PAGE = 200_000
_TAIL_BYTES = 1 << 20
_MAX_RECORDS_READ = 4_000
_MAX_SHARE = 0.02
"""Share of one core that publishing may use."""
_REST_S = 2.0
_PAUSE_AFTER_FAILURE_S = 30.0
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Artifact:
    """One artifact of a stage in its present state."""

    kind: ArtifactKind
    data: float | str
    """Percent, or markdown."""
    description: str


def stage_page(plan: StagePlan) -> Artifact | None:
    """Everything that a stage shows of what it has made; None while there is nothing."""
    views = (written_page, *(_VIEWS[name] for name in STAGE_KINDS[plan.node.stage].views))
    made = [shown for view in views if (shown := view(plan)) is not None]
    if len(made) <= 1:
        return next(iter(made), None)
    text = "\n\n".join(f"## {shown.description}\n\n{shown.data}" for shown in made)
    return Artifact("markdown", text, made[0].description)


def training(plan: StagePlan) -> Artifact | None:
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
    return Artifact("markdown", f"{newest}\n\n{curves}", f"Metrics of {plan.node.name} ({when})")


def rollout_samples(plan: StagePlan) -> Artifact | None:
    """The newest sampled rollouts of an RL run, with their grades."""
    rows = read_last_lines(plan.directory / SAMPLES_FILE, _TAIL_BYTES)
    sections = []
    for row in [row for row in rows if row["step"] == rows[-1]["step"]][-_NUM_SAMPLES:]:
        author = "demonstration" if row["source"] == "off_policy" else "rollout"
        if (hint_level := row.get("hint_level")) is not None:
            author = f"rollout with a hint of level {hint_level}"
        title = f"Step {row['step']}, {author}: **{row['outcome']}**, reward {row['reward']}"
        sections.append(_exchange(title, str(row["prompt"]), str(row["response"])))
    return _page(sections, f"Newest rollouts of {plan.node.name}, with their grades")


def evaluated_samples(plan: StagePlan) -> Artifact | None:
    """One correct and one incorrect response per suite; none from a confidential benchmark."""
    found: dict[tuple[str, bool], str] = {}
    if find_samples(plan.directory) is None:
        return None
    for record in islice(read_samples_of(plan.directory), _MAX_RECORDS_READ):
        if record.may_be_shown and (record.suite, record.correct) not in found:
            answers = f"answer {code_span(str(record.answer))}, reference {code_span(record.ground_truth)}"
            title = f"{record.suite}, {record.decoding}: **{record.outcome}** ({answers})"
            found[record.suite, record.correct] = _exchange(title, record.prompt, record.response)
    return _page([*found.values()], f"Responses in {plan.node.name}, with their grades")


def written_page(plan: StagePlan) -> Artifact | None:
    """What the stage has written for people, as text and tables, with the place of the page with the plots."""
    kind = STAGE_KINDS[plan.node.stage]
    path = plan.directory / kind.text
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    page = plan.directory / kind.pages[0] if kind.pages else path.with_suffix(".html")
    head = f"With all plots, to open in a browser: `{page}`\n\n" if page.is_file() else ""
    cut = "" if len(text) <= _MAX_PAGE else f"\n\n(cut here; the rest is in {path})\n"
    return Artifact("markdown", f"{head}{text[:_MAX_PAGE]}{cut}", kind.title)


_VIEWS: Mapping[ViewName, Callable[[StagePlan], Artifact | None]] = {
    "evaluated_samples": evaluated_samples,
    "rollout_samples": rollout_samples,
    "training_curves": training,
}


def _exchange(title: str, prompt: str, response: str) -> str:
    return f"### {title}\n\nPrompt\n\n{_quoted(prompt)}\n\nResponse\n\n{_quoted(response)}\n"


def _quoted(text: str) -> str:
    """As a code block that no content can close; only the beginning and the end of a long text."""
    if len(text) > _MAX_TEXT:
        half = _MAX_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    return fenced(text)


def _page(sections: Sequence[str], description: str) -> Artifact | None:
    return Artifact("markdown", "\n".join(sections), description) if sections else None


@dataclass(frozen=True, slots=True)
class Slot:
    """One artifact of one task run, created once and then updated."""

    task_run: UUID
    key: str | None
    """None: Prefect shows it with its run alone, and not in the list of all artifacts."""


Writer = Callable[[Slot, Artifact, UUID | None], UUID]
"""Writes an artifact in place of the one with that identifier, or a new one; returns its identifier."""


class Publisher:
    """A background thread that writes artifacts to the Prefect API. On exit, pending artifacts have five seconds.

    Prefect is only a view: a slow, faulty or missing API costs artifacts, never a run. `offer` returns at once. A newer
    artifact replaces one that is still unwritten. After it has written what was offered the thread rests for two
    seconds, or so long that it uses less than 2 % of one core.
    """

    def __init__(self, write: Writer) -> None:
        self._write = write
        self._offered: dict[Slot, Callable[[], Artifact | None]] = {}
        """The newest content of each slot that is still unwritten."""
        self._identifiers: dict[Slot, UUID] = {}
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

    def offer(self, slot: Slot, make: Callable[[], Artifact | None]) -> None:
        """Write the result of `make`, called in the publisher's thread, unless a newer one is offered before."""
        with self._changed:
            self._offered[slot] = make
            self._changed.notify()

    def _work(self) -> None:
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._offered or self._closing)
                offered, self._offered, is_last = self._offered, {}, self._closing
            began, rest_s = time.thread_time(), _REST_S
            for slot, make in offered.items():
                with tolerating_prefect(f"the artifact {slot.key or 'of a progress'} could not be written") as faults:
                    if (artifact := make()) is not None:
                        self._identifiers[slot] = self._write(slot, artifact, self._identifiers.get(slot))
                if faults:
                    rest_s = _PAUSE_AFTER_FAILURE_S
                    with self._changed:  # a stage's last artifact must survive a hiccup of the API
                        self._offered.setdefault(slot, make)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, max(rest_s, (time.thread_time() - began) / _MAX_SHARE))


@contextmanager
def tolerating_prefect(what: str, level: int = logging.DEBUG) -> Iterator[list[Exception]]:
    """Log any error raised in the block as `what` and go on; yields a list that receives the error.

    Prefect is only a view and may not end or delay a run.
    """
    faults: list[Exception] = []
    try:
        yield faults
    except Exception as error:  # its client, its server and the network in between raise anything
        faults.append(error)
        logger.log(level, "%s: %s", what, error, exc_info=level == logging.DEBUG)

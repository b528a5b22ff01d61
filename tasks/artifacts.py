"""The artifacts of a stage in the Prefect UI, made from the files in its directory, and their way there.

A stage has two: its progress, which Prefect shows with the run alone, and a page, which is also in the list of all
artifacts. The same function serves running, finished and reused stages. This module does not use Prefect: whoever makes
a `Publisher` gives it a function that writes.
"""

import contextvars
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal
from uuid import UUID

from luffy.api.runs import Accuracy, read_accuracies
from luffy.cli.run_view import accuracy_table
from luffy.config import STAGE_KINDS
from luffy.config.stage_kinds import ViewName
from luffy.evaluation.sample_files import find_samples, read_samples_of
from luffy.markdown_text import code_span
from luffy.pipeline.plan import StagePlan
from luffy.report.cells import Table, table
from luffy.report.curves import headline_charts, headlines_first
from luffy.report.figures import Chart, colored, picture_url
from luffy.report.page import fenced, markdown_table
from luffy.tracking.metrics import METRICS_FILE, Json, read_last_lines, read_lines, read_metrics
from luffy.tracking.tracker import SAMPLES_FILE

logger = logging.getLogger(__name__)
ArtifactKind = Literal["progress", "table", "markdown"]
_STEPS_BACK = 10
_NUM_SAMPLES = 4
_MAX_TEXT = 4_000
_MAX_PAGE = 200_000
_TAIL_BYTES = 1 << 20
_MAX_RECORDS_READ = 4_000
_MAX_SHARE = 0.02
"""Share of one core that publishing may use."""
_PAUSE_AFTER_FAILURE_S = 30.0
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Artifact:
    """One artifact of a stage in its present state."""

    kind: ArtifactKind
    data: float | str
    """Percent, rows as JSON, or markdown."""
    description: str


def stage_page(plan: StagePlan) -> Artifact | None:
    """Everything that a stage shows of what it has made; None while there is nothing."""
    views = (_VIEWS[name](plan) for name in STAGE_KINDS[plan.node.stage].views)
    made = [view for view in views if view is not None]
    if len(made) <= 1:
        return next(iter(made), None)
    text = "\n\n".join(f"## {view.description}\n\n{view.data}" for view in made)
    return Artifact("markdown", text, made[0].description)


def newest_metrics(plan: StagePlan) -> Artifact | None:
    """A table: each metric now, some steps ago, and in the first step."""
    path = plan.directory / METRICS_FILE
    # Only both ends of the file: it is read every ten seconds, and grows with every step.
    first = next((row for row in read_lines(path) if _step(row) > 0), None)
    rows = [row for row in read_last_lines(path, _TAIL_BYTES) if _step(row) > 0]
    if first is None or not rows:
        return None
    shown = {"now": rows[-1], "before": rows[max(len(rows) - 1 - _STEPS_BACK, 0)], "first": first}
    values = ((name, *(_number(row, name) for row in shown.values())) for name in headlines_first(rows[-1]))
    steps = (f"{when}: step {_step(row)}" for when, row in shown.items())
    words = f"Metrics of {plan.node.name} ({', '.join(steps)})"
    return Artifact("markdown", markdown_table(table(("metric", *shown), values)), words)


def training_curves(plan: StagePlan) -> Artifact | None:
    """A picture of the headline training curves."""
    rows = read_metrics(plan.directory / METRICS_FILE)
    if not rows:
        return None
    return _picture(headline_charts(rows), f"{plan.node.name} over its steps")


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


def accuracies(plan: StagePlan) -> Artifact | None:
    """The table of one evaluation, or of all evaluations in a report."""
    cells = _accuracies(plan)
    if not cells:
        return None
    return Artifact("markdown", markdown_table(accuracy_table(cells)), "Accuracy in % with its interval")


def accuracy_curves(plan: StagePlan) -> Artifact | None:
    """A picture of the accuracy on each suite from checkpoint to checkpoint, one plot per decoding."""
    cells = _accuracies(plan)
    if not cells:
        return None
    checkpoints = list(dict.fromkeys(cell.checkpoint for cell in cells))
    charts = []
    for decoding in dict.fromkeys(cell.decoding for cell in cells):
        points: dict[str, list[tuple[float, float]]] = {}
        for cell in cells:
            if cell.decoding == decoding:
                points.setdefault(cell.suite, []).append((float(checkpoints.index(cell.checkpoint)), cell.accuracy))
        charts.append(Chart(f"accuracy, {decoding}", colored(points), percent=True, places=checkpoints))
    return _picture(charts, "Accuracy from checkpoint to checkpoint")


def card(description: str, plan: StagePlan) -> Artifact | None:
    """The card that the stage has written: what its data are, or what its policy solves."""
    return _file(plan.directory / "card.md", "", description)


def report_page(plan: StagePlan) -> Artifact | None:
    """The report as text and tables, with the place of the page with the plots."""
    way = f"With all plots, to open in a browser: `{plan.directory / 'report.html'}`"
    return _file(plan.directory / "report.md", f"{way}\n\n", "Report")


_VIEWS: Mapping[ViewName, Callable[[StagePlan], Artifact | None]] = {
    "accuracies": accuracies,
    "accuracy_curves": accuracy_curves,
    "data_card": partial(card, "The sources of the data, and what was removed"),
    "difficulty_card": partial(card, "Pass rates of the training prompts"),
    "evaluated_samples": evaluated_samples,
    "metrics": newest_metrics,
    "report_page": report_page,
    "rollout_samples": rollout_samples,
    "synthesis_card": partial(card, "Traces made by teachers"),
    "sample_card": partial(card, "Sampled traces"),
    "training_curves": training_curves,
}


def table_artifact(shown: Table, description: str) -> Artifact:
    """A table of a page as one of the UI: a mapping for each row."""
    rows = [dict(zip(shown.header, row, strict=True)) for row in shown.texts]
    return Artifact("table", json.dumps(rows), description)


def _step(row: Mapping[str, Json]) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step


def _number(row: Mapping[str, Json], name: str) -> str:
    """Empty where the metric is absent, `nan` where it was not finite."""
    value = row.get(name, "")
    return f"{value:.4g}" if isinstance(value, int | float) else "nan" if value is None else ""


def _exchange(title: str, prompt: str, response: str) -> str:
    return f"### {title}\n\nPrompt\n\n{_quoted(prompt)}\n\nResponse\n\n{_quoted(response)}\n"


def _quoted(text: str) -> str:
    """As a code block that no content can close; only the beginning and the end of a long text."""
    if len(text) > _MAX_TEXT:
        half = _MAX_TEXT // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    return fenced(text)


def _picture(charts: Sequence[Chart], description: str) -> Artifact:
    # As markdown, because the UI shows the whole URL next to an artifact of kind "image".
    return Artifact("markdown", f"![{description}]({picture_url(charts)})", description)


def _page(sections: Sequence[str], description: str) -> Artifact | None:
    return Artifact("markdown", "\n".join(sections), description) if sections else None


def _file(path: Path, head: str, description: str) -> Artifact | None:
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    cut = "" if len(text) <= _MAX_PAGE else f"\n\n(cut here; the rest is in {path})\n"
    return Artifact("markdown", f"{head}{text[:_MAX_PAGE]}{cut}", description)


def _accuracies(plan: StagePlan) -> list[Accuracy]:
    """Accuracies in the stage's directory (one folder per step of a sweep) and in those of its inputs."""
    return read_accuracies([plan.directory, *plan.inputs.values()])


@dataclass(frozen=True, slots=True)
class Slot:
    """One artifact of one task run, created once and then updated."""

    task_run: UUID
    key: str | None
    """None: Prefect shows it with its run alone, and not in the list of all artifacts."""


Writer = Callable[[Slot, Artifact, UUID | None], UUID]
"""Writes an artifact in place of the one with that identifier, or a new one; returns its identifier."""


@dataclass(slots=True)
class _ArtifactPlace:
    make: Callable[[], Artifact | None] | None = None
    """The newest content that is still unwritten; None: all is written."""
    due: float = 0.0
    every_s: float = 0.0
    identifier: UUID | None = None


class Publisher:
    """A background thread that writes artifacts to the Prefect API. On exit, pending artifacts have five seconds.

    Prefect is only a view: a slow, faulty or missing API costs artifacts, never a run. `offer` returns at once. A newer
    artifact replaces one that is still unwritten, and after an expensive one the thread rests, so that all of them
    together use less than 2 % of one core.
    """

    def __init__(self, write: Writer) -> None:
        self._write = write
        self._places: dict[Slot, _ArtifactPlace] = {}
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

    def offer(self, slot: Slot, make: Callable[[], Artifact | None], *, every_s: float = 0.0) -> None:
        """Write the result of `make`, called in the publisher's thread, at most once in `every_s` (0: at once)."""
        with self._changed:
            place = self._places.setdefault(slot, _ArtifactPlace())
            place.make, place.every_s = make, every_s
            if not every_s:
                place.due = 0.0
            self._changed.notify()

    def _work(self) -> None:
        resting_until = 0.0
        while True:
            with self._changed:
                waiting = [(slot, place) for slot, place in self._places.items() if place.make is not None]
                if not waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                    continue
                slot, place = min(waiting, key=lambda found: found[1].due)
                wait_s = max(place.due, resting_until) - time.monotonic()
                if wait_s > 0 and not self._closing:
                    self._changed.wait(wait_s)
                    continue
                make, place.make = place.make, None
            assert make is not None
            began = time.thread_time()
            with tolerating_prefect(f"the artifact {slot.key or 'of a progress'} could not be written") as faults:
                if (artifact := make()) is not None:
                    place.identifier = self._write(slot, artifact, place.identifier)
            spent, now = time.thread_time() - began, time.monotonic()
            place.due = now + place.every_s
            resting_until = now + spent / _MAX_SHARE
            if faults:
                resting_until = max(resting_until, now + _PAUSE_AFTER_FAILURE_S)
                with self._changed:  # a stage's last artifact must survive a hiccup of the API
                    if place.make is None and not self._closing:
                        place.make = make


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

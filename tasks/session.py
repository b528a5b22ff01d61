"""What the tasks of one flow run share: the started run, and who watches it."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from luffy.cli.console import stage_display
from luffy.config import ExperimentConfig
from luffy.pipeline.events import Event
from luffy.pipeline.experiment import ExperimentRun, StageObserver, open_experiment, start_run
from luffy.pipeline.manifest import Manifest
from luffy.pipeline.plan import StagePlan
from luffy.pipeline.workspace import Workspace

_ARTIFACT_INTERVAL_S = 1.0
_IMPORTANT = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")


class Session:
    """A run of the experiment and its display."""

    def __init__(self, run: ExperimentRun, display: StageObserver) -> None:
        self.run = run
        self.display = display


@contextmanager
def open_session(
    config: ExperimentConfig, workspace: Workspace, *, verify: bool, sweep_steps: tuple[int, ...] = ()
) -> Iterator[Session]:
    """Everything open for the stages of `config`; the run's record says how it ended."""
    experiment = open_experiment(config, workspace, verify=verify, sweep_steps=sweep_steps)
    names = [node.name for node in experiment.nodes]
    with start_run(experiment) as run, stage_display(names) as display:
        yield Session(run, display)


class PrefectObserver:
    """Passes what a stage reports to the display and to Prefect: its run's log and a progress artifact."""

    def __init__(self, display: StageObserver) -> None:
        self._display = display
        self._logger = get_run_logger()
        self._artifact: UUID | None = None
        self._updated = 0.0

    def planned(self, plan: StagePlan) -> None:
        self._logger.info("%s: %s", plan.headline, plan.reason or plan.identity.key)
        self._display.planned(plan)

    def event(self, plan: StagePlan, event: Event) -> None:
        self._display.event(plan, event)
        if event.kind == "progress":
            self._show_progress(plan, event)
        elif event.text:
            self._logger.info("%s: %s", event.kind, event.text)

    def line(self, plan: StagePlan, text: str) -> None:
        self._display.line(plan, text)
        if _IMPORTANT.search(text):
            self._logger.warning("%s", text)

    def finished(self, plan: StagePlan, manifest: Manifest) -> None:
        self._logger.info("%s in %s: %s", plan.headline, plan.directory, manifest.metrics)
        self._display.finished(plan, manifest)

    def failed(self, plan: StagePlan, error: BaseException) -> None:
        self._display.failed(plan, error)

    def _show_progress(self, plan: StagePlan, event: Event) -> None:
        now = time.monotonic()
        if event.step < event.total and now - self._updated < _ARTIFACT_INTERVAL_S:
            return
        self._updated = now
        percent = 100.0 * event.step / event.total if event.total else 0.0
        try:
            if self._artifact is None:
                # In a synchronous caller this is the identifier itself, although the signature says more.
                self._artifact = cast(UUID, create_progress_artifact(percent, description=f"{plan.node.name}: steps"))
            else:
                update_progress_artifact(self._artifact, percent)
        except Exception:  # Prefect is a view: whatever is wrong with it must not end a training
            self._logger.debug("the progress artifact could not be written", exc_info=True)

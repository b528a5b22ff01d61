"""State that the tasks of a flow run share: the run, its display, and its artifacts in the Prefect UI."""

import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from uuid import UUID

from prefect import tags
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger

from luffy.cli.console import duration, progress_words, stage_display
from luffy.cli.progress import StageLine
from luffy.config import ExperimentConfig, load_experiment
from luffy.errors import LuffyError, StageFailed
from luffy.pipeline.events import Event, EventKind
from luffy.pipeline.experiment import ExperimentRun, StageObserver, open_experiment, start_run
from luffy.pipeline.graph import select_nodes
from luffy.pipeline.manifest import Manifest
from luffy.pipeline.plan import StagePlan
from luffy.pipeline.workspace import Workspace
from luffy.processes import watch_parent
from luffy.tasks.artifacts import Artifact, views_of
from luffy.tasks.cancellation import WORKER_S, watching_for_cancellation
from luffy.tasks.one_line import explain_in_one_line
from luffy.tasks.publisher import Publisher, Slot
from luffy.tasks.stage_log import StageLog

_PROGRESS_INTERVAL_S = 2.0
_LOG_INTERVAL_S = 30.0
_REQUEST_TIMEOUT_S = 60.0
_FAREWELL_S = 20.0
HOST_TAG = "host:"
"""Begins the tag of a flow run that names the host on which it runs, so that a server knows which runs are its own."""
_LEVELS: dict[EventKind, int] = {"failed": logging.ERROR, "waiting": logging.WARNING}

# At import, because errors in a flow's parameters come before it opens a session.
explain_in_one_line()


class Session:
    """A run of the experiment, its display and its artifacts."""

    def __init__(
        self,
        run: ExperimentRun,
        display: StageObserver,
        publisher: Publisher,
        stop: Callable[[], None] = lambda: None,
        force: Collection[str] = (),
        *,
        adopts: bool = False,
    ) -> None:
        self.run = run
        self.display = display
        self.publisher = publisher
        self.stop = stop
        """Ends stages that run outside the main thread."""
        self.force = frozenset(force)
        """Stages (nodes) that are made again although they are finished."""
        self.adopts = adopts
        """Whether results that other code has made are taken over."""

    @property
    def page(self) -> Path | None:
        """The page to open after the run; None if no stage has made one."""
        pages = [self.run.directory / page for node in self.run.experiment.nodes for page in node.kind.pages[:1]]
        return next((page for page in reversed(pages) if page.exists()), None)


@contextmanager
def open_session(
    config: ExperimentConfig,
    workspace: Workspace,
    *,
    verify: bool,
    sweep_steps: tuple[int, ...] = (),
    force: Sequence[str] = (),
    adopts: bool = False,
) -> Iterator[Session]:
    """Open everything that the stages of `config` need, and record how the run ended.

    `force`: stages that are made again although they are finished; UserError for one that the chain does not have.
    `adopts`: results that differ in their code alone are taken over.
    """
    experiment = open_experiment(config, workspace, verify=verify, sweep_steps=sweep_steps)
    names = [node.name for node in experiment.nodes]
    stopped = threading.Event()
    with (
        watching_the_server() as flow_run,
        start_run(experiment, stopped.is_set) as run,
        publishing(flow_run, tags_of(config)) as publisher,
        stage_display(names) as display,
    ):
        forced = select_nodes(experiment.nodes, force, "--force")
        yield Session(run, display, publisher, stopped.set, forced, adopts=adopts)


@contextmanager
def watching_the_server() -> Iterator[UUID]:
    """Within the block, the flow run ends when it is cancelled or loses its worker; yields its identifier."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "to be opened inside a flow"
    by_worker = context.flow_run.deployment_id is not None
    if by_worker:
        watch_parent(os.getppid(), _end_without_worker)
    with watching_for_cancellation(context.flow_run.id, after_s=WORKER_S if by_worker else 0.0):
        yield context.flow_run.id


@contextmanager
def publishing(flow_run: UUID, labels: list[str]) -> Iterator[Publisher]:
    """Publish artifacts for the tasks of `flow_run`, all tagged with `labels`."""
    with Publisher(PrefectWriter(flow_run, labels)) as publisher, tags(*labels):
        yield publisher


def _end_without_worker() -> None:
    """After the death of the worker: end the stage gracefully, then this process in any case."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_FAREWELL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def tags_of(config: ExperimentConfig) -> list[str]:
    """Tags for filtering runs in the UI: experiment, method and chain."""
    named = {"experiment": config.name, "method": config.method, "chain": config.chain}
    return [f"{what}:{name}" for what, name in named.items() if name is not None]


def run_name(config_file: str, overrides: list[str]) -> str:
    """Name of a run in the UI: experiment, method or chain, and other overrides."""
    try:
        config = load_experiment(config_file, overrides)
    except LuffyError:  # the flow reports it as soon as it runs
        return " ".join([Path(config_file).stem, *overrides])
    changed = [override for override in overrides if not override.startswith(("method=", "chain=", "name="))]
    return " ".join([config.name, *filter(None, [config.method or config.chain]), *changed])


class PrefectWriter:
    """Writes the flow run's artifacts, and on the first call its tags, to Prefect's API; for use from one thread.

    Besides the labels of its experiment a run gets the name of its host as a tag.
    """

    def __init__(self, flow_run: UUID, labels: list[str]) -> None:
        self._flow_run = flow_run
        self._labels = labels
        self._client: SyncPrefectClient | None = None

    def create(self, slot: Slot, artifact: Artifact) -> UUID:
        """The new artifact's identifier."""
        created = self._open().create_artifact(
            ArtifactCreate(
                type=artifact.kind,
                key=slot.key,
                description=artifact.description,
                data=artifact.data,
                flow_run_id=self._flow_run,
                task_run_id=slot.task_run,
            )
        )
        return created.id

    def update(self, identifier: UUID, artifact: Artifact) -> None:
        """Replace what the artifact shows."""
        change = ArtifactUpdate(data=artifact.data, description=artifact.description)
        # Not by `update_artifact`, which also records an event in the server's database each time.
        self._open().request(
            "PATCH",
            "/artifacts/{id}",
            json=change.model_dump(mode="json", exclude_unset=True),
            path_params={"id": identifier},
        )

    def _open(self) -> SyncPrefectClient:
        if self._client is None:
            client = get_client(sync_client=True, httpx_settings={"timeout": _REQUEST_TIMEOUT_S})
            known = [tag for tag in client.read_flow_run(self._flow_run).tags if not tag.startswith(HOST_TAG)]
            tags = dict.fromkeys([*known, *self._labels, f"{HOST_TAG}{socket.gethostname()}"])
            client.update_flow_run(self._flow_run, tags=list(tags))
            self._client = client
        return self._client


class PrefectObserver:
    """Forwards a stage's events to the display and to Prefect: events, and log and artifacts of its task."""

    def __init__(self, session: Session) -> None:
        self._display = session.display
        self._publisher = session.publisher
        self._experiment = session.run.experiment.config.name
        self._logger = get_run_logger()
        self._log = StageLog(self._logger)
        context = TaskRunContext.get()
        assert context is not None, "to be made inside a task"
        self._task_run = context.task_run.id
        self._attempt = context.task_run.run_count
        """From 1 on."""
        self._execution = session.run.experiment.config.execution
        self._line = StageLine("")
        self._logged = 0.0

    def planned(self, plan: StagePlan) -> None:
        self._line = StageLine(plan.node.name, began=time.time())
        self._logger.info("%s: %s", plan.headline, plan.reason or plan.identity.key)
        self._logger.info("its files: %s", plan.directory)
        self._display.planned(plan)
        self._show_progress(plan, 0.0, f"{plan.headline}, starting")

    def event(self, plan: StagePlan, event: Event) -> None:
        self._display.event(plan, event)
        self._line.take(event)
        if event.kind == "progress":
            self._progressed(plan)
        elif event.text:
            self._logger.log(_LEVELS.get(event.kind, logging.INFO), "%s: %s", event.kind, event.text)
        if event.kind == "waiting":
            self._show_progress(plan, self._line.percent, self._line.note)

    def line(self, plan: StagePlan, text: str) -> None:
        self._display.line(plan, text)
        self._log.line(text)

    def finished(self, plan: StagePlan, manifest: Manifest) -> None:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())
        self._logger.info("%s; %s", "reused" if plan.action == "reuse" else "finished", figures or "no figures")
        self._display.finished(plan, manifest)
        took = duration(self._line.seconds(time.time()) or 0.0)
        self._show_progress(plan, 100.0, "reused" if plan.action == "reuse" else f"finished in {took}")
        self._offer_views(plan)

    def failed(self, plan: StagePlan, error: BaseException) -> None:
        if isinstance(error, StageFailed) and error.temporary and self._attempt <= self._execution.retries:
            why = str(error).partition("\n")[0].partition("; the end of ")[0].removeprefix(f"{plan.node.name} ")
            delay = f"resuming in {self._execution.retry_delay_s:.0f} s ({self._attempt} of {self._execution.retries})"
            self.event(plan, Event("message", time.time(), os.getpid(), text=f"{why}; {delay}"))
            return
        self._display.failed(plan, error)
        line = self._line
        where = f" at step {line.step}/{line.total}; run it again to resume it" if line.total else ""
        self._show_progress(plan, line.percent, f"ended{where}")

    def _progressed(self, plan: StagePlan) -> None:
        words = progress_words(self._line)
        self._show_progress(plan, self._line.percent, words, every_s=_PROGRESS_INTERVAL_S)
        self._offer_views(plan, running=True)
        if (now := time.monotonic()) - self._logged >= _LOG_INTERVAL_S:
            self._logged = now
            self._logger.info("%s", words)

    def _show_progress(self, plan: StagePlan, percent: float, words: str, *, every_s: float = 0.0) -> None:
        artifact = Artifact("progress", percent, f"{plan.node.name}: {words}")
        self._offer(plan, "progress", lambda: artifact, every_s=every_s)

    def _offer_views(self, plan: StagePlan, *, running: bool = False) -> None:
        for view in views_of(plan.node.stage):
            self._offer(plan, view.name, partial(view.make, plan), every_s=view.every_s if running else 0.0)

    def _offer(self, plan: StagePlan, name: str, make: Callable[[], Artifact | None], *, every_s: float = 0.0) -> None:
        slot = Slot(self._task_run, artifact_key(self._experiment, plan.node.name, name))
        self._publisher.offer(slot, make, every_s=every_s)


def artifact_key(*parts: str) -> str:
    """A key in the form that Prefect allows: lower-case letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")

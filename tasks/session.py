"""State that the tasks of a flow run share: the run, its display, its log and pages in the UI."""

import functools
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import UUID

from prefect import tags
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging import get_run_logger

from luffy.api.runs import track_run
from luffy.cli.console import StageLine, progress_words, stage_display
from luffy.config import ExperimentConfig, load_experiment
from luffy.errors import LuffyError, StageFailed
from luffy.pipeline.events import Event, EventKind
from luffy.pipeline.experiment import ExperimentRun, StageObserver, open_experiment, start_run
from luffy.pipeline.graph import select_nodes
from luffy.pipeline.manifest import Manifest
from luffy.pipeline.plan import StagePlan, several_to_make
from luffy.pipeline.warm_start import WarmServer, can_start_warm
from luffy.pipeline.workspace import Workspace
from luffy.processes import watch_parent
from luffy.tasks.artifacts import Artifact, Publisher, Writer, stage_page

HOST_TAG = "host:"
"""Begins the tag of a flow run that names the host on which it runs, so that a server knows which runs are its own."""
_LEVELS: dict[EventKind, int] = {"failed": logging.ERROR, "waiting": logging.WARNING}
_LONGEST_NAME = 60
"""Letters that the UI shows of a run's name."""
_LOG_INTERVAL_S = 30.0
_REQUEST_TIMEOUT_S = 60.0
_FAREWELL_S = 20.0
_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)$")
_FOREIGN = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
_NOISE = re.compile(r"\r|\d+%\|.*\||^\s*$")
"""Progress bars and empty lines."""
_WINDOW_S = 10.0
_MAX_LINES = 100
_MAX_LENGTH = 2_000


def in_one_line(record: logging.LogRecord) -> bool:
    """Replaces the traceback of a `LuffyError` by its message, as on the terminal; other failures keep theirs."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, LuffyError):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True


# At import, because errors in a flow's parameters come before it opens a session.
for _name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
    logging.getLogger(_name).addFilter(in_one_line)


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
    display: StageObserver | None = None,
    labels: list[str] | None = None,
) -> Iterator[Session]:
    """Open everything that the stages of `config` need, and record how the run ended.

    `force`: stages that are made again although they are finished; UserError for one that the chain does not have.
    `adopts`: results that differ in their code alone are taken over. `display` and `labels` (tags of the flow run)
    default to those of a single run.
    """
    experiment = open_experiment(config, workspace, verify=verify, sweep_steps=sweep_steps)
    names = [node.name for node in experiment.nodes]
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None, "to be opened inside a flow"
    flow_run, by_worker = context.flow_run.id, context.flow_run.deployment_id is not None
    stopped = threading.Event()

    def end_without_worker() -> None:
        """After the death of the worker: end the stage gracefully, then this process in any case."""
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_FAREWELL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    if by_worker:
        watch_parent(os.getppid(), end_without_worker)
    with ExitStack() as stack:
        # The command line has started one already, if it is worth it.
        if by_worker and can_start_warm() and (display is not None or several_to_make(experiment.plan())):
            stack.enter_context(WarmServer(workspace.warm_log).use())
        run = stack.enter_context(start_run(experiment, stopped.is_set))
        labels = labels or tags_of(config)
        publisher = stack.enter_context(Publisher(_writer(flow_run, labels)))
        stack.enter_context(tags(*labels))
        shown = stack.enter_context(stage_display(names)) if display is None else display
        forced = select_nodes(experiment.nodes, force, "--force")
        yield Session(run, shown, publisher, stopped.set, forced, adopts=adopts)
        track_run(run.directory, experiment.labels(run.directory.name))


def tags_of(config: ExperimentConfig) -> list[str]:
    """Tags for filtering runs in the UI: experiment, method and chain."""
    named = {"experiment": config.name, "method": config.method, "chain": config.chain}
    return [f"{what}:{name}" for what, name in named.items() if name is not None]


def run_name(config_file: str, overrides: list[str]) -> str:
    """Name of a run in the UI: experiment, method or chain, and other overrides, in at most 60 letters."""
    try:
        config = load_experiment(config_file, overrides)
    except LuffyError:  # the flow reports it as soon as it runs
        parts = [Path(config_file).stem, *overrides]
    else:
        changed = [override for override in overrides if not override.startswith(("method=", "chain=", "name="))]
        parts = [config.name, *filter(None, [config.method or config.chain]), *changed]
    name = " ".join(parts)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def artifact_key(*parts: str) -> str:
    """A key in the form that Prefect allows: lower-case letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")


class PrefectObserver(StageObserver):
    """Forwards a stage's events to the display and to Prefect: log and page of its task."""

    def __init__(self, session: Session) -> None:
        self._display = session.display
        self._publisher = session.publisher
        self._config = session.run.experiment.config
        self._logger = get_run_logger()
        self._log = StageLog(self._logger.log)
        context = TaskRunContext.get()
        assert context is not None, "to be made inside a task"
        self._task_run = context.task_run.id
        self._attempt = context.task_run.run_count
        """From 1 on."""
        self._line = StageLine("")
        self._logged = 0.0

    def planned(self, plan: StagePlan) -> None:
        self._line = StageLine(plan.node.name, began=time.time())
        self._logger.info("%s: %s", plan.headline, plan.reason or plan.identity.key)
        self._logger.info("its files: %s", plan.directory)
        self._display.planned(plan)

    def event(self, plan: StagePlan, event: Event) -> None:
        self._display.event(plan, event)
        self._line.take(event)
        if event.kind == "progress":
            self._offer_page(plan)
            if (now := time.monotonic()) - self._logged >= _LOG_INTERVAL_S:
                self._logged = now
                self._logger.info("%s", progress_words(self._line))
        elif event.text:
            self._logger.log(_LEVELS.get(event.kind, logging.INFO), "%s: %s", event.kind, event.text)

    def line(self, plan: StagePlan, text: str) -> None:
        self._display.line(plan, text)
        self._log.line(text)

    def finished(self, plan: StagePlan, manifest: Manifest) -> None:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())
        self._logger.info("%s; %s", "reused" if plan.action == "reuse" else "finished", figures or "no figures")
        self._display.finished(plan, manifest)
        self._offer_page(plan)

    def failed(self, plan: StagePlan, error: BaseException) -> None:
        execution = plan.node.config.execution
        if isinstance(error, StageFailed) and error.temporary and self._attempt <= execution.retries:
            why = str(error).partition("\n")[0].partition("; the end of ")[0].removeprefix(f"{plan.node.name} ")
            delay = f"resuming in {execution.retry_delay_s:.0f} s ({self._attempt} of {execution.retries})"
            self.event(plan, Event("message", time.time(), os.getpid(), text=f"{why}; {delay}"))
            return
        self._display.failed(plan, error)

    def _offer_page(self, plan: StagePlan) -> None:
        key = artifact_key(self._config.name, plan.node.name)
        self._publisher.offer(self._task_run, key, functools.partial(stage_page, plan))


def _writer(flow_run: UUID, labels: list[str]) -> Writer:
    """Writes the flow run's artifacts, and on the first call its tags, to Prefect's API; for use from one thread.

    Besides the labels of its experiment a run gets the name of its host as a tag.
    """

    @functools.cache
    def client() -> SyncPrefectClient:
        opened = get_client(sync_client=True, httpx_settings={"timeout": _REQUEST_TIMEOUT_S})
        known = [tag for tag in opened.read_flow_run(flow_run).tags if not tag.startswith(HOST_TAG)]
        found = dict.fromkeys([*known, *labels, f"{HOST_TAG}{socket.gethostname()}"])
        opened.update_flow_run(flow_run, tags=list(found))
        return opened

    def write(task_run: UUID, key: str, artifact: Artifact, identifier: UUID | None) -> UUID:
        words, data = artifact.description, artifact.text
        if identifier is None:
            new = ArtifactCreate(
                type="markdown", key=key, description=words, data=data, flow_run_id=flow_run, task_run_id=task_run
            )
            return client().create_artifact(new).id
        change = ArtifactUpdate(data=data, description=words).model_dump(mode="json", exclude_unset=True)
        # Not by `update_artifact`, which also records an event in the server's database each time.
        client().request("PATCH", "/artifacts/{id}", json=change, path_params={"id": identifier})
        return identifier

    return write


class StageLog:
    """Forwards lines of a stage's log, each at its own level: at most a hundred in ten seconds; `log.txt` has all."""

    def __init__(self, log: Callable[..., None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._level = logging.INFO
        """Level of the last record, which continuation lines (such as a traceback) inherit."""
        self._window = -_WINDOW_S
        self._lines = 0

    def line(self, text: str) -> None:
        if _NOISE.search(text):
            return
        words, levels = text, logging.getLevelNamesMapping()
        if record := _RECORD.match(text):
            level = self._level = levels[record[1]]
            words = record[2]
        elif text.startswith("Traceback (most recent call last)"):
            level = self._level = logging.ERROR
        else:
            foreign = _FOREIGN.search(text)
            level = levels[foreign[1]] if foreign else self._level
        now = self._clock()
        if now - self._window >= _WINDOW_S:
            if (dropped := self._lines - _MAX_LINES) > 0:
                self._log(logging.WARNING, "%s", f"{dropped} lines left out here; they are in log.txt")
            self._window, self._lines = now, 0
        self._lines += 1
        if self._lines <= _MAX_LINES:
            self._log(level, "%s", words[:_MAX_LENGTH])

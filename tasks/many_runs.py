"""Several runs of one command under Prefect: one task each, several at a time, every stage that they share made once.

Runs are threads of the flow's process, and their stages its child processes. Each task is called in its thread, never
submitted, so that cancelling ends the stages at once, as for a single experiment.
"""

import contextvars
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from luffy.cli.console import ChainProgress, PlainDisplay, TitledDisplay, terminal
from luffy.config import ExperimentConfig
from luffy.config.many_runs.arm_run import ArmRun
from luffy.errors import EXIT_INTERRUPTED, LuffyError, StageFailed
from luffy.evaluation.method_comparison.arms import FinishedSeed, read_seed
from luffy.pipeline.experiment import StageObserver, Unwatched, open_experiment, start_run
from luffy.pipeline.walk import stopping_on_failure
from luffy.pipeline.workspace import Workspace, link
from luffy.report.cells import Table, plain_table
from luffy.tasks.artifacts import Artifact, Publisher, Slot
from luffy.tasks.session import Session, artifact_key, publishing, watching_the_server
from luffy.tasks.stages import FinishedStage, make_stage

RunOutcome = FinishedSeed | LuffyError


class ManyRuns:
    """State that the tasks of all runs share; safe to use from several threads."""

    def __init__(
        self,
        workspace: Workspace,
        workers: int,
        verify: bool,
        display: StageObserver,
        session: Session,
        stopped: threading.Event,
    ) -> None:
        self.workspace = workspace
        self.workers = workers
        """Runs at the same time."""
        self.verify = verify
        self.display = display
        self.session = session
        """Session of the run that represents all of them; it also makes the stages that all share."""
        self.stopped = stopped
        self.stages = SharedStages()

    @property
    def folder(self) -> Path:
        """Where the page of all runs is."""
        return self.session.run.directory


class SharedStages:
    """Makes each shared stage once: other runs wait for it, and fail if it failed."""

    def __init__(self) -> None:
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._failures: dict[str, LuffyError] = {}

    def make(self, key: str, make: Callable[[], FinishedStage]) -> FinishedStage:
        """The result of `make`; raises its LuffyError, also if another run raised it."""
        with self._locks[key]:
            if key in self._failures:
                raise self._failures[key]
            try:
                return make()
            except LuffyError as error:
                self._failures[key] = error
                raise


@contextmanager
def open_runs(
    common: ExperimentConfig, titles: Sequence[str], workspace: Workspace, *, workers: int, verify: bool, tag: str
) -> Iterator[ManyRuns]:
    """Open what several runs share: display, record and Prefect publisher; the run of `common` records their outcome.

    `titles` are the titles of all stages in display order; the Prefect run is tagged `tag:NAME`.
    """
    display = PlainDisplay(ChainProgress(list(titles)), terminal())
    experiment = open_experiment(common, workspace, verify=verify)
    stopped = threading.Event()
    with (
        watching_the_server() as flow_run,
        start_run(experiment, stopped.is_set) as run,
        publishing(flow_run, [f"{tag}:{common.name}"]) as publisher,
    ):
        session = Session(run, display, publisher, stopped.set)
        yield ManyRuns(workspace, workers, verify, display, session, stopped)


def run_all(
    running: ManyRuns,
    runs: Sequence[ArmRun],
    shared: Mapping[str, FinishedStage],
    check_start: Callable[[], None] = lambda: None,
) -> dict[str, RunOutcome]:
    """Execute `runs`, `workers` at a time; returns the result or the failure of each by `ArmRun.folder`.

    `shared` holds finished stages by name, for the runs that contain them. `check_start` is called before each run; if
    it raises a LuffyError, the run does not start and fails with that error. An interrupt, or any error other than a
    LuffyError, ends all runs.
    """

    def start(run: ArmRun) -> FinishedSeed:
        check_start()
        return learn(running, run, shared)

    workers = running.workers
    with ThreadPoolExecutor(workers, thread_name_prefix="arm") as pool, stopping_on_failure(pool, running.stopped.set):
        futures = [pool.submit(contextvars.copy_context().run, start, run) for run in runs]
        return {run.folder: _outcome(future) for run, future in zip(runs, futures, strict=True)}


@task(name="learn", task_run_name="{run.title}", retries=0, cache_policy=NO_CACHE, persist_result=False)
def learn(running: ManyRuns, run: ArmRun, shared: Mapping[str, FinishedStage]) -> FinishedSeed:
    """One arm with one seed, from the base policy to the evaluation of the last checkpoint."""
    experiment = open_experiment(run.config, running.workspace, verify=running.verify)
    with start_run(experiment, running.stopped.is_set) as started:
        link(started.directory, running.folder / "arms" / run.folder)
        taken = {name: stage for name, stage in shared.items() if name in run.nodes}
        for name in taken:
            started.execute(name, Unwatched())  # reused: only enters the stage into the run's record
        session = Session(started, TitledDisplay(run.title, running.display), running.session.publisher)
        made = _learn(running, run, session, taken)
        return read_seed(run, {name: made[name].directory for name in run.nodes})


def _outcome(future: "Future[FinishedSeed]") -> RunOutcome:
    try:
        return future.result()
    except LuffyError as error:
        return error


def _learn(
    running: ManyRuns, run: ArmRun, session: Session, shared: Mapping[str, FinishedStage]
) -> dict[str, FinishedStage]:
    """The shared stages and the run's own; a stage that several runs contain is made once."""
    made = dict(shared)
    for node in session.run.experiment.nodes:
        if node.name in run.nodes and node.name not in shared:
            if running.stopped.is_set():
                raise StageFailed("interrupted; the same command resumes it", exit_code=EXIT_INTERRUPTED)
            inputs = {name: made[source] for name, source in node.inputs.items()}
            key = session.run.experiment.identities[node.name].key
            made[node.name] = running.stages.make(key, partial(make_stage, session, node, inputs))
    return made


def parted(outcomes: Mapping[int, RunOutcome]) -> tuple[tuple[FinishedSeed, ...], dict[int, str]]:
    """Split `outcomes` by seed into the finished ones and one line for each failure."""
    return (
        tuple(outcome for outcome in outcomes.values() if isinstance(outcome, FinishedSeed)),
        {seed: first_line(outcome) for seed, outcome in outcomes.items() if isinstance(outcome, LuffyError)},
    )


def first_line(error: LuffyError) -> str:
    """The first line of an error's message; further lines quote a log."""
    return str(error).partition("\n")[0]


def raise_failures(failures: Sequence[str], num_runs: int) -> None:
    """Raise a LuffyError that lists `failures`, one line each, if some of the `num_runs` runs have failed."""
    if failures:
        failed = f"{len(failures)} of {num_runs} runs have failed; the same command tries them again:"
        raise LuffyError("\n".join([failed, *failures]))


def offer_artifacts(name: str, kind: str, artifacts: Mapping[str, Artifact], publisher: Publisher) -> None:
    """Publish artifacts in Prefect as those of the calling task."""
    context = TaskRunContext.get()
    assert context is not None
    for part, artifact in artifacts.items():
        slot = Slot(context.task_run.id, artifact_key(name, kind, part))
        publisher.offer(slot, partial(_finished, artifact))


def table_artifact(table: Table, description: str) -> Artifact:
    """A page's table as an artifact."""
    header, rows = plain_table(table)
    return Artifact("table", json.dumps([dict(zip(header, row, strict=True)) for row in rows]), description)


def page_artifact(page: Path, what: str) -> Artifact:
    """The place of `page`, the page of a `what` (comparison, grid)."""
    return Artifact("markdown", f"With all plots, to open in a browser: `{page}`", what)


def _finished(artifact: Artifact) -> Artifact:
    return artifact

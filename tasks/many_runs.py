"""The runs of a grid, a comparison or a study under Prefect: one task each, several at a time, shared stages made once.

Runs are threads of the flow's process, and their stages its child processes. Each task is called in its thread, never
submitted, so that cancelling ends the stages at once, as for a single experiment.
"""

import contextvars
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from luffy.api.runs import track_run
from luffy.cli.console import ChainProgress, terminal
from luffy.config.many_runs.sweep_design import ONLY_CELL
from luffy.config.many_runs.sweep_runs import SHARED_NODES, Sweep, SweepRun
from luffy.errors import EXIT_INTERRUPTED, LuffyError, StageFailed, first_line
from luffy.evaluation.across_runs.run_results import RunOutcome, RunResult, read_run
from luffy.evaluation.across_runs.sweep_findings import (
    Findings,
    SweepProgress,
    arms_of,
    choose,
    find_on_arms,
    findings_json,
    tuning_of,
)
from luffy.evaluation.results import read_scores
from luffy.files import write_atomic
from luffy.pipeline.experiment import StageObserver, open_experiment, start_run
from luffy.pipeline.walk import stopping_on_failure
from luffy.pipeline.workspace import Workspace, link
from luffy.report.page import html, markdown
from luffy.report.sweep_pages import sweep_page
from luffy.tasks.artifacts import Artifact
from luffy.tasks.session import Session, artifact_key, open_session
from luffy.tasks.stages import FinishedStage, make_chain, make_stage


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


class ManyRuns:
    """State that the tasks of all runs share; safe to use from several threads.

    No dataclass, into which Prefect would look for results of other tasks.
    """

    def __init__(self, session: Session, display: ChainProgress, workers: int) -> None:
        self.display = display
        self.session = session
        """Session of the run that represents all of them; it also makes the stages that all share."""
        self.workers = workers
        """Runs at the same time."""
        self.stages = SharedStages()

    @property
    def folder(self) -> Path:
        """Where the page of all runs is."""
        return self.session.run.directory


@contextmanager
def open_runs(sweep: Sweep, cells: Sequence[str], workspace: Workspace, *, verify: bool) -> Iterator[ManyRuns]:
    """Open what the runs of `cells` share: display, record and Prefect publisher.

    The run of `sweep.common` records their outcome; the Prefect run is tagged `KIND:NAME`.
    """
    # An arm has the same stages at every point of its grid, so titles can be listed before values are chosen.
    runs, common = [*sweep.tuning_runs(cells), *sweep.reported_runs(cells)], sweep.common()
    shared = SHARED_NODES if sweep.design.kind == "comparison" else ()
    titles = dict.fromkeys([*shared, *(f"{run.title}: {node}" for run in runs for node in run.nodes)])
    display = ChainProgress(titles, terminal())
    labels = [f"{sweep.design.kind}:{common.name}"]
    with open_session(common, workspace, verify=verify, display=display, labels=labels) as session:
        yield ManyRuns(session, display, sweep.design.workers)


def run_arms(running: ManyRuns, sweep: Sweep) -> Findings:
    """Execute a grid or a comparison, whose arms with a grid are tuned first, and write its page."""
    shared = make_chain(running.session) if sweep.design.arms else {}  # data, base policy and its evaluation
    tuning = chosen = None
    if sweep.design.select is not None:
        tuning = tuning_of(sweep, ONLY_CELL, run_all(running, sweep.tuning_runs(), shared))
        chosen = {ONLY_CELL: choose(tuning, strict=False)}
    runs = sweep.reported_runs(chosen=chosen)
    outcomes = run_all(running, runs, shared)
    base = read_scores(shared["evaluate_base"].directory) if shared else None
    return conclude(running, find_on_arms(sweep, arms_of(sweep, runs, outcomes), base, tuning))


def run_cells(running: ManyRuns, sweep: Sweep, cells: Sequence[str]) -> None:
    """Execute the unfinished runs of `cells`: tuning first, then reported runs. LuffyError where some have failed."""
    experiment = running.session.run.experiment
    progress = SweepProgress(sweep, experiment.workspace, verify=experiment.verify)
    num_runs, failures = 0, list[str]()

    def make(runs: Sequence[SweepRun]) -> None:
        nonlocal num_runs
        left = progress.left(runs)
        num_runs += len(left)
        outcomes = run_all(running, left, {})
        failed = {run.title: outcomes[run.folder] for run in left}
        failures.extend(
            f"{title}: {first_line(error)}" for title, error in failed.items() if isinstance(error, LuffyError)
        )
        progress.forget()

    make(sweep.tuning_runs(cells))
    make(sweep.reported_runs(cells, progress.chosen(cells)))
    raise_failures(failures, num_runs)


def run_all(running: ManyRuns, runs: Sequence[SweepRun], shared: Mapping[str, FinishedStage]) -> dict[str, RunOutcome]:
    """Execute `runs`, `workers` at a time; returns the result or the failure of each by `SweepRun.folder`.

    `shared` holds finished stages by name, for the runs that contain them. An interrupt, or any error other than a
    LuffyError, ends all runs.
    """

    def outcome(run: SweepRun) -> RunOutcome:
        try:
            return learn(running, run, shared)
        except LuffyError as error:
            running.display.run_failed(run.title, error)
            return error

    workers, stop = running.workers, running.session.stop
    with ThreadPoolExecutor(workers, thread_name_prefix="arm") as pool, stopping_on_failure(pool, stop):
        futures = [pool.submit(contextvars.copy_context().run, outcome, run) for run in runs]
        return {run.folder: future.result() for run, future in zip(runs, futures, strict=True)}


@task(name="learn", task_run_name="{run.title}", retries=0, cache_policy=NO_CACHE, persist_result=False)
def learn(running: ManyRuns, run: SweepRun, shared: Mapping[str, FinishedStage]) -> RunResult:
    """One arm with one seed, from the base policy to the evaluation of the last checkpoint."""
    session, common = running.session, running.session.run.experiment
    experiment = open_experiment(run.config, common.workspace, verify=common.verify)
    with start_run(experiment, session.run.stopped) as started:
        link(started.directory, running.folder / "arms" / run.folder)
        made = {name: stage for name, stage in shared.items() if name in run.nodes}
        for name in made:
            started.execute(name, StageObserver())  # reused: only enters the stage into the run's record
        own = Session(started, running.display.titled(run.title), session.publisher)
        for node in experiment.nodes:
            if node.name in run.nodes and node.name not in made:
                if started.stopped():
                    raise StageFailed("interrupted; the same command resumes it", exit_code=EXIT_INTERRUPTED)
                inputs = {name: made[source] for name, source in node.inputs.items()}
                key = experiment.identities[node.name].key
                made[node.name] = running.stages.make(key, partial(make_stage, own, node, inputs))
        track_run(started.directory, experiment.labels(started.directory.name))
        return read_run(run, {name: made[name].directory for name in run.nodes})


@task(name="conclude", task_run_name="{findings.design.kind}", retries=0, cache_policy=NO_CACHE, persist_result=False)
def conclude(running: ManyRuns, findings: Findings) -> Findings:
    """Write the page, the data and the artifact; never cached, since it only reads finished results."""
    kind = findings.design.kind
    page, place = sweep_page(findings), running.folder / f"{kind}.html"
    write_atomic(place, html(page))
    write_atomic(running.folder / f"{kind}.json", findings_json(findings))
    text = f"With all plots, to open in a browser: `{place}`\n\n{markdown(page)}"
    context = TaskRunContext.get()
    assert context is not None
    key = artifact_key(findings.design.name, kind)
    running.session.publisher.offer(context.task_run.id, key, lambda: Artifact(text, kind.capitalize()))
    return findings


def raise_failures(failures: Sequence[str], num_runs: int) -> None:
    """Raise a LuffyError that lists `failures`, one line each, if some of the `num_runs` runs have failed."""
    if failures:
        failed = f"{len(failures)} of {num_runs} runs have failed; the same command tries them again:"
        raise LuffyError("\n".join([failed, *failures]))

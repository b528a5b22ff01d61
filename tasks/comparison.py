"""A comparison of methods under Prefect: shared stages once, then one task per run, several at a time.

Runs are threads of the flow's process, and their stages its child processes. Each task is called in its thread, never
submitted, so that cancelling ends the stages at once, as for a single experiment.
"""

import contextvars
import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from luffy.cli.console import PlainDisplay, TitledDisplay, stage_title, terminal
from luffy.cli.progress import ChainProgress
from luffy.config.comparison import SHARED_NODES, ArmRun, Comparison
from luffy.errors import EXIT_INTERRUPTED, LuffyError, StageFailed
from luffy.evaluation.checkpoint_scores import read_scores
from luffy.evaluation.method_comparison.arms import Arm, FinishedSeed, read_seed
from luffy.evaluation.method_comparison.findings import Findings, as_json, find
from luffy.files import write_atomic
from luffy.pages.method_comparison_page import (
    accuracy_table,
    as_text,
    cost_table,
    difference_table,
    render_comparison,
)
from luffy.pages.plotter import Plot, colored, picture_url
from luffy.pages.tables import Table
from luffy.pipeline.chain.walk import stopping_on_failure
from luffy.pipeline.experiment import StageObserver, Unwatched, open_experiment, start_run
from luffy.pipeline.workspace import Workspace, link
from luffy.tasks.artifacts import Artifact
from luffy.tasks.publisher import Publisher, Slot
from luffy.tasks.session import Session, artifact_key, publishing, watching_the_server
from luffy.tasks.stages import FinishedStage, make_stage

PAGE_FILE = "comparison.html"
DATA_FILE = "comparison.json"


class RunningComparison:
    """State that the tasks of a comparison share; safe to use from several threads."""

    def __init__(
        self,
        comparison: Comparison,
        workspace: Workspace,
        verify: bool,
        display: StageObserver,
        session: Session,
        stopped: threading.Event,
    ) -> None:
        self.comparison = comparison
        self.workspace = workspace
        self.verify = verify
        self.display = display
        self.session = session
        """Session of the stages that all runs share."""
        self.stopped = stopped
        self.stages = SharedStages()
        self.outcomes: dict[tuple[str, int], FinishedSeed | LuffyError] = {}
        """By arm and seed."""


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
def open_comparison(comparison: Comparison, workspace: Workspace, *, verify: bool) -> Iterator[RunningComparison]:
    """Open everything that the runs of `comparison` need, and record how the comparison ended."""
    name = comparison.config.name
    titles = [stage_title(run.title, node) for run in comparison.runs for node in run.nodes]
    display = PlainDisplay(ChainProgress([*SHARED_NODES, *titles]), terminal())
    experiment = open_experiment(comparison.shared, workspace, verify=verify)
    stopped = threading.Event()
    with (
        watching_the_server() as flow_run,
        start_run(experiment, stopped.is_set) as run,
        publishing(flow_run, [f"comparison:{name}"]) as publisher,
    ):
        session = Session(run, display, publisher, stopped.set)
        yield RunningComparison(comparison, workspace, verify, display, session, stopped)


def run_arms(running: RunningComparison, shared: Mapping[str, FinishedStage]) -> None:
    """Make all runs, `workers` at a time; results and failures are in `running.outcomes`.

    An interrupt, or any error other than a LuffyError, ends all of them.
    """
    runs = running.comparison.runs
    workers = running.comparison.config.workers
    with ThreadPoolExecutor(workers, thread_name_prefix="arm") as pool, stopping_on_failure(pool, running.stopped.set):
        futures = [pool.submit(contextvars.copy_context().run, learn, running, run, shared) for run in runs]
        for run, future in zip(runs, futures, strict=True):
            running.outcomes[run.arm, run.seed] = _outcome(future)


@task(name="learn", task_run_name="{run.title}", retries=0, cache_policy=NO_CACHE, persist_result=False)
def learn(running: RunningComparison, run: ArmRun, shared: Mapping[str, FinishedStage]) -> FinishedSeed:
    """One arm with one seed, from the base policy to the evaluation of the last checkpoint."""
    experiment = open_experiment(run.config, running.workspace, verify=running.verify)
    with start_run(experiment, running.stopped.is_set) as started:
        link(started.directory, running.session.run.directory / "arms" / f"{run.arm}-{run.seed}")
        for name in shared:
            started.execute(name, Unwatched())  # reused: only enters the stage into the run's record
        session = Session(started, TitledDisplay(run.title, running.display), running.session.publisher)
        made = _learn(running, run, session, shared)
        return read_seed(run, {name: made[name].directory for name in run.nodes})


@task(name="comparison", task_run_name="comparison", retries=0, cache_policy=NO_CACHE, persist_result=False)
def conclude(running: RunningComparison, evaluated_base: FinishedStage) -> Findings:
    """Write the page, the data and the artifacts; never cached, since it only reads finished results."""
    config = running.comparison.config
    findings = find(
        config.name,
        config.budget,
        config.reference,
        config.seeds,
        read_scores(evaluated_base.directory),
        [_arm(running, name) for name in config.arms],
    )
    folder = running.session.run.directory
    write_atomic(folder / PAGE_FILE, render_comparison(findings))
    write_atomic(folder / DATA_FILE, as_json(findings))
    _show(findings, running.workspace, folder, running.session.publisher)
    return findings


def _outcome(future: "Future[FinishedSeed]") -> FinishedSeed | LuffyError:
    try:
        return future.result()
    except LuffyError as error:
        return error


def _learn(
    running: RunningComparison, run: ArmRun, session: Session, shared: Mapping[str, FinishedStage]
) -> dict[str, FinishedStage]:
    """The shared stages and the arm's own, each made once for all arms that have it."""
    made = dict(shared)
    for node in session.run.experiment.nodes:
        if node.name in run.nodes and node.name not in shared:
            if running.stopped.is_set():
                raise StageFailed("interrupted; the same command resumes it", exit_code=EXIT_INTERRUPTED)
            inputs = {name: made[source] for name, source in node.inputs.items()}
            key = session.run.experiment.identities[node.name].key
            made[node.name] = running.stages.make(key, partial(make_stage, session, node, inputs))
    return made


def _arm(running: RunningComparison, name: str) -> Arm:
    config = running.comparison.config
    found = {seed: running.outcomes[name, seed] for seed in config.seeds}
    recipe = config.arms[name]
    return Arm(
        name,
        recipe.chain,
        recipe.method,
        tuple(outcome for outcome in found.values() if isinstance(outcome, FinishedSeed)),
        {seed: first_line(outcome) for seed, outcome in found.items() if isinstance(outcome, LuffyError)},
    )


def first_line(error: LuffyError) -> str:
    """The message of an error, without the end of a log."""
    return str(error).partition("\n")[0]


def _show(findings: Findings, workspace: Workspace, folder: Path, publisher: Publisher) -> None:
    context = TaskRunContext.get()
    assert context is not None
    for name, artifact in _artifacts(findings, workspace, folder).items():
        slot = Slot(context.task_run.id, artifact_key(findings.name, "comparison", name))
        publisher.offer(slot, _finished(artifact))


def _finished(artifact: Artifact) -> Callable[[], Artifact]:
    return lambda: artifact


def _artifacts(findings: Findings, workspace: Workspace, folder: Path) -> dict[str, Artifact]:
    decoding = findings.decodings[0]
    differences = difference_table(findings, decoding)
    found = {
        "accuracy": _table(accuracy_table(findings, decoding), f"Accuracy in %, {decoding}, with its interval"),
        "costs": _table(cost_table(findings), "Costs of a seed, mean over seeds"),
        "page": _page(workspace, folder),
    }
    if differences is not None:
        words = f"Percentage points minus {findings.reference}, {decoding}; p-values after Holm's correction"
        found["differences"] = _table(differences, words)
    curves = {arm.name: [(point.steps, point.reward) for point in arm.curve] for arm in findings.arms if arm.curve}
    if curves:
        picture = picture_url([Plot("Reward", colored(curves), over="optimizer steps")])
        found["curves"] = Artifact("markdown", f"![reward]({picture})", "Reward over optimizer steps, mean over seeds")
    return found


def _table(table: Table, description: str) -> Artifact:
    header, rows = as_text(table)
    return Artifact("table", json.dumps([dict(zip(header, row, strict=True)) for row in rows]), description)


def _page(workspace: Workspace, folder: Path) -> Artifact:
    page = folder / PAGE_FILE
    if workspace.pages_address.is_file():
        url = f"{workspace.pages_address.read_text(encoding='utf-8').strip()}/runs/{folder.name}/{PAGE_FILE}"
        return Artifact("markdown", f"[The comparison with all plots]({url}) (`{page}`)", "Comparison")
    return Artifact("markdown", f"With all plots, to open in a browser: `{page}`", "Comparison")

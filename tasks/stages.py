"""The Prefect task for each kind of stage, and the execution of a whole chain.

A stage's directory is its entry in Prefect's cache: the record lies there beside the manifest, and loading it checks
the result's files. So a finished stage is `Cached`, a damaged one a miss. Two runs that need a stage at once make it
once: the second waits for a lock that the kernel frees when its holder dies, and finds the record.

Tasks are called directly, never submitted: only then does a cancelled run end its stages at once.

A stage that is not reused queues for its GPUs by lock files (`luffy.pipeline.gpus`), whatever server its run has.
"""

import os
import re
import time
from collections.abc import Collection, Mapping

from prefect import task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.serializers import JSONSerializer
from prefect.settings import PREFECT_TASKS_REFRESH_CACHE
from prefect.transactions import CommitMode, IsolationLevel, transaction

from luffy.config.chain import StageNode
from luffy.errors import StageFailed
from luffy.pipeline.events import Event, EventKind
from luffy.pipeline.lock import FlockManager
from luffy.pipeline.reuse import RECORD_FILE, FinishedStage
from luffy.pipeline.walk import find_room, walk
from luffy.tasks.session import PrefectObserver, Session

_ERROR_RECORD = re.compile(r"[0-9a-f]{32}")
"""Name of the file in which Prefect keeps the exception of a failed task, beside the stages' folders."""


@task(task_run_name="{node}", persist_result=True, result_serializer=JSONSerializer(), cache_result_in_memory=False)
def _make(session: Session, node: str, inputs: Mapping[str, FinishedStage], started: list[str]) -> FinishedStage:
    """Make the stage `node`; `inputs` shows Prefect the stages that it depends on, `started` receives each attempt."""
    is_first = not started
    started.append(node)
    session.run.execute(node, PrefectObserver(session), afresh=is_first and _is_refreshed(session, node))
    return session.run.experiment.finished(node)


def make_stage(session: Session, node: StageNode, inputs: Mapping[str, FinishedStage]) -> FinishedStage:
    """Make `node` from `inputs` (by input name) in the task of its kind, or reuse it.

    A stage that was killed, or has lost a process or an endpoint, is resumed `execution.retries` times.
    """
    experiment, execution = session.run.experiment, node.config.execution
    # The key of its record: the place below the stages of the workspace.
    record = f"{node.stage}/{experiment.identities[node.name].key}/{RECORD_FILE}"
    started: list[str] = []

    def tell(kind: EventKind, text: str) -> None:
        plan = experiment.plan_node(node.name)
        session.display.planned(plan)
        session.display.event(plan, Event(kind, time.time(), os.getpid(), text=text))

    if session.adopts and (adopted := experiment.adopt(node.name)) is not None:
        tell("message", f"adopts {adopted}, which other code has made")
    locks = FlockManager(experiment.workspace.locks, lambda holder: tell("waiting", holder), session.run.stopped)
    configured = _make.with_options(
        name=node.kind.name,
        description=node.kind.title,
        cache_policy=CacheKeyFnPolicy(
            cache_key_fn=lambda context, parameters: record,
            isolation_level=IsolationLevel.SERIALIZABLE,
            lock_manager=locks,
        ),
        result_storage=experiment.workspace.stages,
        # A verification reads every file, which the record's check does not.
        refresh_cache=experiment.verify or _is_refreshed(session, node.name),
        retries=execution.retries,
        retry_delay_seconds=execution.retry_delay_s,
        retry_condition_fn=lambda _, run, state: isinstance(state.data, StageFailed) and state.data.temporary,
    )
    try:
        # Eager, since the record and the lock of a stage would else wait for the end of the task of the whole run that
        # has called this one, and a failure there would leave the lock of a cached stage held.
        with transaction(commit_mode=CommitMode.EAGER):
            finished = configured(session, node.name, inputs, started)
    finally:
        for path in experiment.workspace.stages.iterdir():
            if _ERROR_RECORD.fullmatch(path.name):  # nothing reads it
                path.unlink(missing_ok=True)
    if not started:  # Cached: it has yet to be shown, and entered into the run's record
        session.run.execute(node.name, session.display)
    return finished


def _is_refreshed(session: Session, node: str) -> bool:
    """Whether a finished result is to be made again, by luffy's option or by Prefect's setting."""
    return node in session.force or PREFECT_TASKS_REFRESH_CACHE.value()


def make_chain(session: Session, only: Collection[str] = ()) -> dict[str, FinishedStage]:
    """Make every stage of the session's experiment, or reuse it; returns the results by node.

    Independent stages run at the same time if the machine has the resources. With `only`, the stages (nodes) to make:
    UserError where one that they are made from is not finished.
    """
    experiment = session.run.experiment
    nodes = experiment.chain_of(only, adopts=session.adopts)
    room = find_room(experiment.config, nodes)
    return walk(nodes, lambda node, inputs: make_stage(session, node, inputs), room, session.stop)

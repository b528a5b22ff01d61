"""The Prefect task for each kind of stage, and the execution of a whole chain.

A task starts the stage program, watches it and returns the location of the result; for a finished stage it starts
nothing. Tasks are called directly, never submitted: only then does a cancelled run end its stages at once. Prefect does
not retry them: the run resumes a failed stage itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from luffy.config import STAGE_KINDS
from luffy.pipeline.chain.graph import StageNode
from luffy.pipeline.chain.walk import find_room, walk
from luffy.tasks.gpu_slots import gpu_slots
from luffy.tasks.session import PrefectObserver, Session


@dataclass(frozen=True)
class FinishedStage:
    """Location and digest of a stage's result."""

    node: str
    directory: Path
    digest: str
    """Hash over all its outputs."""


@task(task_run_name="{node}", retries=0, cache_policy=NO_CACHE, persist_result=False)
def _make(session: Session, node: str, inputs: Mapping[str, FinishedStage]) -> FinishedStage:
    """Make the stage `node`, or reuse it; `inputs` only shows Prefect the stages that it depends on."""
    manifest = session.run.execute(node, PrefectObserver(session), gpu_slots)
    directory = session.run.experiment.workspace.stage_directory(manifest.stage, manifest.key)
    return FinishedStage(node, directory, manifest.digest)


_TASKS = {kind.name: _make.with_options(name=kind.name, description=kind.title) for kind in STAGE_KINDS.values()}


def make_stage(session: Session, node: StageNode, inputs: Mapping[str, FinishedStage]) -> FinishedStage:
    """Make `node` from `inputs` (by input name) in the task of its kind, or reuse it."""
    return _TASKS[node.stage](session, node.name, inputs)


def make_chain(session: Session) -> dict[str, FinishedStage]:
    """Make every stage of the session's experiment, or reuse it; returns the results by node.

    Independent stages run at the same time if the machine has the resources.
    """
    experiment = session.run.experiment
    room = find_room(experiment.config, experiment.nodes)
    return walk(experiment.nodes, lambda node, inputs: make_stage(session, node, inputs), room, session.stop)

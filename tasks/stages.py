"""One Prefect task a stage: it starts the stage program, watches it and returns where its result is.

A stage that is finished already is returned without starting anything. Tasks are called directly, never submitted:
only then does a cancelled run end its stage at once. They are not retried: a stage resumes by itself.
"""

from dataclasses import dataclass
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from luffy.tasks.gpu_slots import gpu_slots
from luffy.tasks.session import PrefectObserver, Session


@dataclass(frozen=True)
class FinishedStage:
    """Where the result of a stage is."""

    node: str
    directory: Path
    digest: str
    """Hash over all its outputs."""


@task(name="prepare_data", task_run_name="prepare_data", retries=0, cache_policy=NO_CACHE, persist_result=False)
def prepare_data(session: Session) -> FinishedStage:
    """Verified prompts with traces, the evaluation suites and the tokenizer."""
    return _make(session, "prepare_data")


@task(name="base", task_run_name="base", retries=0, cache_policy=NO_CACHE, persist_result=False)
def base(session: Session, data: FinishedStage) -> FinishedStage:
    """The starting policy."""
    return _make(session, "base")


@task(name="difficulty", task_run_name="difficulty", retries=0, cache_policy=NO_CACHE, persist_result=False)
def difficulty(session: Session, data: FinishedStage, model: FinishedStage) -> FinishedStage:
    """The training prompts that the policy solves neither too seldom nor too often."""
    return _make(session, "difficulty")


@task(name="train_sft", task_run_name="train_sft", retries=0, cache_policy=NO_CACHE, persist_result=False)
def train_sft(session: Session, data: FinishedStage, model: FinishedStage) -> FinishedStage:
    """The policy after supervised learning on traces."""
    return _make(session, "sft")


@task(name="train_rl", task_run_name="train_rl", retries=0, cache_policy=NO_CACHE, persist_result=False)
def train_rl(session: Session, data: FinishedStage, model: FinishedStage) -> FinishedStage:
    """The policy after mixed-policy reinforcement learning."""
    return _make(session, "rl")


@task(
    name="evaluate",
    task_run_name="evaluate_{checkpoint.node}",
    retries=0,
    cache_policy=NO_CACHE,
    persist_result=False,
)
def evaluate(session: Session, data: FinishedStage, checkpoint: FinishedStage) -> FinishedStage:
    """Accuracy of one checkpoint over all suites and decodings."""
    return _make(session, f"evaluate_{checkpoint.node}")


@task(name="sweep", task_run_name="sweep", retries=0, cache_policy=NO_CACHE, persist_result=False)
def sweep(session: Session, data: FinishedStage, rl: FinishedStage) -> FinishedStage:
    """Accuracy of the RL run's checkpoints of the session's steps, one after the other by one engine."""
    return _make(session, "sweep")


@task(name="report", task_run_name="report", retries=0, cache_policy=NO_CACHE, persist_result=False)
def report(session: Session, stages: list[FinishedStage]) -> FinishedStage:
    """The page a person opens; its tables and the accuracies are shown in the Prefect UI, too."""
    return _make(session, "report")


def _make(session: Session, node: str) -> FinishedStage:
    manifest = session.run.execute(node, PrefectObserver(session), gpu_slots)
    directory = session.run.experiment.workspace.stage_directory(manifest.stage, manifest.key)
    return FinishedStage(node, directory, manifest.digest)

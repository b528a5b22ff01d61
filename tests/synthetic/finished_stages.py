"""Stages of an experiment finished by hand, and runs that have used them: nothing is computed."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from luffy.config.execution import ExecutionConfig
from luffy.pipeline.experiment import Experiment, ExperimentRun, RunState, StageObserver
from luffy.pipeline.identity import IdentityRecord, write_identity
from luffy.pipeline.manifest import Manifest, collect_outputs, consumed_digests, write_manifest
from luffy.pipeline.plan import StagePlan


def write_finished(directory: Path, stage: str, node: str, key: str, outputs: Iterable[str], **fields: object) -> None:
    """The manifest of a finished stage; `fields` differ from one without inputs that took a minute."""
    plain: dict[str, object] = {
        "series": None, "settings": {}, "upstream": {}, "consumed": {}, "metrics": {}, "execution": ExecutionConfig(),
        "versions": {}, "hardware": {}, "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:01:00+00:00",
    }  # fmt: skip
    found = collect_outputs(directory, tuple(outputs))
    write_manifest(directory, Manifest(stage=stage, node=node, key=key, outputs=found, **{**plain, **fields}))


def begin(plan: StagePlan, steps: int = 0, experiment: str = "smoke") -> None:
    """What a stage leaves behind when it is killed after `steps`."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    consumed = consumed_digests(plan.inputs)
    record = IdentityRecord(plan.identity.key, plan.node.name, plan.identity, consumed, experiment)
    write_identity(plan.directory, record)
    if steps:
        checkpoint = plan.directory / "checkpoints" / f"step_{steps:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMPLETE").touch()


def finish(
    experiment: Experiment,
    name: str,
    content: str = "weights",
    steps: int = 0,
    metrics: str = "{}\n",
    hardware: Mapping[str, str] = MappingProxyType({}),
) -> StagePlan:
    """Do the work of stage `name`: outputs `model/weights`, `metrics.jsonl` and its pages."""
    plan = experiment.plan_node(name)
    begin(plan, steps, experiment.config.name)
    (plan.directory / "model").mkdir(exist_ok=True)
    (plan.directory / "model" / "weights").write_text(content)
    (plan.directory / "metrics.jsonl").write_text(metrics)
    for page in plan.node.kind.pages:
        (plan.directory / page).write_text("page")
    write_finished(
        plan.directory,
        plan.node.stage,
        name,
        plan.identity.key,
        ("model", "metrics.jsonl", *plan.node.kind.pages),
        series=plan.identity.series,
        settings=plan.identity.settings,
        upstream=plan.identity.upstream,
        consumed=consumed_digests(plan.inputs),
        metrics={"loss": 1.0},
        execution=experiment.config.execution,
        hardware=dict(hardware),
    )
    return plan


def finish_all(experiment: Experiment, steps: int = 0) -> None:
    for node in experiment.nodes:
        finish(experiment, node.name, steps=steps)


def run_of(experiment: Experiment, state: RunState = "finished") -> Path:
    """The directory of a run that has used every stage of `experiment`, all of which are finished."""
    run = ExperimentRun(experiment, experiment.workspace.new_run(experiment.config.name, {"state": "running"}))
    for node in experiment.nodes:
        run.execute(node.name, StageObserver())
    run.record(state)
    return run.directory

"""A small experiment whose stages are finished by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from luffy.config import ExperimentConfig, load_experiment
from luffy.pipeline.experiment import Experiment, open_experiment
from luffy.pipeline.identity import IdentityRecord, write_identity
from luffy.pipeline.manifest import Manifest, collect_outputs, consumed_digests, write_manifest
from luffy.pipeline.plan import StagePlan
from luffy.pipeline.workspace import Workspace

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"


@pytest.fixture(scope="session")
def smoke() -> ExperimentConfig:
    return load_experiment(SMOKE)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def opened(workspace: Workspace) -> Callable[..., Experiment]:
    """An experiment on smoke.yaml with overrides; `code` stands in for the fingerprints."""

    def open_it(*overrides: str, code: dict[str, str] | None = None, verify: bool = False) -> Experiment:
        config = load_experiment(SMOKE, overrides)
        return open_experiment(config, workspace, verify=verify, fingerprint=lambda stage: code or {"module": "1"})

    return open_it


def begin(plan: StagePlan, steps: int = 0) -> None:
    """What a stage leaves behind when it is killed after `steps`."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    record = IdentityRecord(plan.identity.key, plan.node.name, plan.identity, consumed_digests(plan.inputs))
    write_identity(plan.directory, record)
    if steps:
        checkpoint = plan.directory / "checkpoints" / f"step_{steps:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "COMPLETE").touch()


def finish(experiment: Experiment, name: str, content: str = "weights", steps: int = 0) -> StagePlan:
    """Do the work of stage `name`: outputs `model/weights` and `metrics.jsonl`."""
    plan = experiment.plan_node(name)
    begin(plan, steps)
    (plan.directory / "model").mkdir(exist_ok=True)
    (plan.directory / "model" / "weights").write_text(content)
    (plan.directory / "metrics.jsonl").write_text("{}\n")
    manifest = Manifest(
        stage=plan.node.stage,
        node=name,
        key=plan.identity.key,
        series=plan.identity.series,
        settings=plan.identity.settings,
        upstream=plan.identity.upstream,
        consumed=consumed_digests(plan.inputs),
        outputs=collect_outputs(plan.directory, ("model", "metrics.jsonl")),
        metrics={"loss": 1.0},
        execution=experiment.config.execution,
        versions={},
        hardware={},
        started="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:01:00+00:00",
    )
    write_manifest(plan.directory, manifest)
    return plan


def finish_all(experiment: Experiment, steps: int = 0) -> None:
    for node in experiment.nodes:
        finish(experiment, node.name, steps=steps)


@pytest.fixture(name="finish")
def _finish() -> Callable[..., StagePlan]:
    return finish


@pytest.fixture(name="begin")
def _begin() -> Callable[..., None]:
    return begin


@pytest.fixture(name="finish_all")
def _finish_all() -> Callable[..., None]:
    return finish_all

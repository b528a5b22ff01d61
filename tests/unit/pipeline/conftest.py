"""A small experiment whose stages are finished by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic.finished_stages import begin, finish, finish_all

from luffy.config import ExperimentConfig, load_experiment
from luffy.pipeline.experiment import Experiment, open_experiment
from luffy.pipeline.plan import StagePlan
from luffy.pipeline.workspace import Workspace

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"


@pytest.fixture(scope="session")
def smoke() -> ExperimentConfig:
    return load_experiment(SMOKE)


@pytest.fixture
def smoke_path() -> Path:
    return SMOKE


@pytest.fixture
def workspace(tmp_path) -> Workspace:
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def opened(workspace) -> Callable[..., Experiment]:
    """An experiment on smoke.yaml with overrides; `code` stands in for the fingerprints."""

    def open_it(*overrides: str, code: dict[str, str] | None = None, verify: bool = False) -> Experiment:
        config = load_experiment(SMOKE, overrides)
        return open_experiment(config, workspace, verify=verify, code=lambda rooms: code or {"module": "1"})

    return open_it


@pytest.fixture(name="finish")
def _finish() -> Callable[..., StagePlan]:
    return finish


@pytest.fixture(name="begin")
def _begin() -> Callable[..., None]:
    return begin


@pytest.fixture(name="finish_all")
def _finish_all() -> Callable[..., None]:
    return finish_all

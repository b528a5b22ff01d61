"""Stages of an experiment in the test's process, where a process is not the subject: seconds less each."""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from filecmp import cmp
from pathlib import Path
from typing import Any

import pytest

from luffy.config import load_experiment
from luffy.config.chain import StageNode
from luffy.config.experiment import ExperimentConfig
from luffy.errors import EXIT_USER_ERROR, StageFailed
from luffy.pipeline import experiment as experiments
from luffy.pipeline.events import EVENTS_FILE, Event, EventReader, EventWriter
from luffy.pipeline.experiment import Experiment, ExperimentRun, StageObserver, open_experiment
from luffy.pipeline.graph import build_graph
from luffy.pipeline.workspace import Workspace
from luffy.stages import program
from luffy.stages.program import StageContext, StageResult
from luffy.tracking.metrics import METRICS_FILE, read_metrics, without_times

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "exp_configs"
WEIGHTS = "model/model.safetensors"


def opened(workspace: Path, config: str, *overrides: str) -> Experiment:
    """A shipped experiment, or that of a file, in a workspace."""
    return open_experiment(load_experiment(CONFIGS / config, overrides), Workspace(workspace))


def execute(experiment: Experiment, *nodes: str) -> Path:
    """Make these stages, by default all, by their programs; returns the folder of their run. Raises StageFailed."""
    folder = experiment.workspace.new_run(experiment.config.name, {})
    run = ExperimentRun(experiment, folder)
    with in_process():
        for node in nodes or [node.name for node in experiment.nodes]:
            run.execute(node, StageObserver())
    run.record("finished")
    return folder


@contextmanager
def in_process() -> Iterator[None]:
    """Within the block, runs make their stages in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiments, "supervise", _run_program)
        patch.setattr(program, "receive_stop_requests", lambda: None)  # pytest keeps its own signal handlers
        yield


def _run_program(command: Sequence[str], directory: Path, *, on_event: Callable[[Event], None], **_: object) -> None:
    """What `supervise` does with `python -m MODULE ARGUMENT ...`, without a process."""
    (_, _, module, *arguments), events = command, EventReader(directory / EVENTS_FILE, from_end=True)
    stage = importlib.import_module(module)
    code = program.run_program(module.rpartition(".")[2], stage.run, arguments)
    failure = ""
    for event in events.read():
        failure = event.text if event.kind == "failed" else failure
        on_event(event)
    if code == EXIT_USER_ERROR:
        raise StageFailed(failure, code)
    if code:
        raise StageFailed(f"failed with exit code {code}: {failure}", code)


def only(stages: Path, kind: str) -> Path:
    """The one finished stage of its kind."""
    (directory,) = (path.parent for path in (stages / kind).glob("*/manifest.json"))
    return directory


def node_of(config: ExperimentConfig, stage: str) -> StageNode:
    """The stage of that name, or the first of that kind in the chain."""
    nodes = build_graph(config)
    return next(node for found in ("name", "stage") for node in nodes if getattr(node, found) == stage)


def run_stage(
    config: ExperimentConfig,
    stage: str,
    out: Path,
    inputs: Mapping[str, Path],
    extends: Path | None = None,
) -> StageResult:
    """Call the `run` of one stage, without its program: no key, no lock, no manifest."""
    out.mkdir(parents=True, exist_ok=True)
    node = node_of(config, stage)
    events = EventWriter(out / EVENTS_FILE)
    context = StageContext(out, inputs, "key", node.name, config.execution, config.tracking, events, extends)
    return importlib.import_module(node.kind.program).run(node.settings, context)


def upstream_of(config: ExperimentConfig, folder: Path) -> dict[str, Path]:
    """What the RL and SFT stages of an experiment need, made in the folder: data and a base policy."""
    run_stage(config, "prepare_data", folder / "data", {})
    run_stage(config, "base", folder / "model", {"data": folder / "data"})
    return {"data": folder / "data", "model": folder / "model", "held_out": folder / "data"}


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The metrics of a stage without those that depend on time."""
    return [without_times(row) for row in read_metrics(out / METRICS_FILE)]


def assert_same_result(one: Path, other: Path, *files: str) -> None:
    """The same bits in the model, in these files and in the metrics."""
    for file in (WEIGHTS, *files):
        assert cmp(one / file, other / file, shallow=False), file
    assert json.dumps(rows_of(one)) == json.dumps(rows_of(other))

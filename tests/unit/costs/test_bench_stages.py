"""Which layout a bench names as the fastest."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from luffy.config import ExperimentConfig, load_experiment
from luffy.costs import bench_stages
from luffy.costs.bench_run import BenchOptions
from luffy.costs.bench_stages import OpenBench
from luffy.costs.readings import Reading
from luffy.costs.stage_times import StageTimes
from luffy.errors import EXIT_INTERRUPTED, StageFailed
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.machine import resources
from luffy.pipeline.workspace import Workspace

CONFIGS = Path(__file__).parents[3] / "exp_configs"
NO_TIMES = StageTimes(0.0, 0.0, 0.0, None, "")


class TimedBench:
    """Steps that take as long as the layout says: fewer with more engines, fewest under ZeRO 1; ZeRO 3 cannot run."""

    exit_code = 1

    def __init__(self, experiment: SimpleNamespace, *_: object) -> None:
        self._execution = experiment.config.execution

    def measure(self, plan: object) -> Reading:
        if self._execution.zero_stage == 3:
            raise StageFailed("rl failed: out of memory\nlog", self.exit_code)
        seconds = 10.0 / self._execution.ray.engines + self._execution.zero_stage
        return Reading("rl", NO_TIMES, "2 steps", step_s=seconds)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "detected_gpus", lambda: ())
    monkeypatch.setattr(bench_stages, "Bench", TimedBench)
    monkeypatch.setattr(bench_stages, "open_experiment", lambda config, workspace: SimpleNamespace(config=config))


def opened(config: ExperimentConfig, tmp_path: Path) -> OpenBench:
    plans = open_experiment(config, Workspace(tmp_path), code=lambda rooms: {}).plan()
    measured = [plan for plan in plans if plan.node.stage == "rl"]
    inputs = SimpleNamespace()
    return OpenBench(None, config, Workspace(tmp_path), BenchOptions(2), tmp_path, inputs, measured, ())  # type: ignore[arg-type]


def test_every_split_is_tried_and_then_every_zero_stage_at_the_fastest_split(tmp_path: Path) -> None:
    config = load_experiment(CONFIGS / "smoke_ray.yaml", ["execution.ray.trainer_ranks=3", "execution.ray.engines=1"])
    tried: dict[str, Reading | str] = {}
    fastest = opened(config, tmp_path).try_layouts(lambda layout, outcome: tried.update({layout.words: outcome}))
    assert list(tried)[:3] == [
        "3 trainer ranks and 1 engine, disaggregated, ZeRO 2",
        "2 trainer ranks and 2 engines, disaggregated, ZeRO 2",
        "1 trainer rank and 3 engines, disaggregated, ZeRO 2",
    ]
    # With a single rank there is nothing for ZeRO to shard, so that split is tried as it is.
    assert fastest is not None and fastest.words == "1 trainer rank and 3 engines, disaggregated, ZeRO 2"
    assert len(tried) == 3


def test_a_zero_stage_that_fails_is_told_and_not_named(tmp_path: Path) -> None:
    config = load_experiment(
        CONFIGS / "smoke_ray.yaml", ["execution.ray.trainer_ranks=2", "execution.vllm.tensor_parallel_size=2"]
    )
    tried: dict[str, Reading | str] = {}
    fastest = opened(config, tmp_path).try_layouts(lambda layout, outcome: tried.update({layout.words: outcome}))
    assert fastest is not None and fastest.words.endswith("ZeRO 0")
    assert tried["2 trainer ranks and 1 engine, disaggregated, ZeRO 3"] == "rl: not measured: rl failed: out of memory"


def test_where_no_layout_runs_none_is_the_fastest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: TimedBench, plan: object) -> Reading:
        raise StageFailed("rl failed: out of memory\nlog")

    monkeypatch.setattr(TimedBench, "measure", fail)
    config = load_experiment(CONFIGS / "smoke_ray.yaml", ["execution.ray.trainer_ranks=2"])
    tried: list[Reading | str] = []
    assert opened(config, tmp_path).try_layouts(lambda layout, outcome: tried.append(outcome)) is None
    assert set(tried) == {"rl: not measured: rl failed: out of memory"}


def test_one_process_has_no_other_layout(tmp_path: Path) -> None:
    config = load_experiment(CONFIGS / "smoke.yaml")
    assert opened(config, tmp_path).try_layouts(lambda layout, outcome: None) is None


def test_an_interrupt_ends_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimedBench, "exit_code", EXIT_INTERRUPTED)
    config = load_experiment(CONFIGS / "smoke_ray.yaml", ["execution.zero_stage=3"])
    with pytest.raises(StageFailed):
        opened(config, tmp_path).try_layouts(lambda layout, outcome: None)

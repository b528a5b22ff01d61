"""The settings that a bench gives to the stages it measures."""

from pathlib import Path
from typing import NoReturn

import pytest

from luffy.config import load_experiment
from luffy.config.settings import StageSettings
from luffy.costs.bench_inputs import BenchInputs
from luffy.costs.bench_run import Bench, BenchOptions
from luffy.errors import StageFailed
from luffy.pipeline.chain.plan import StagePlan
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"


def test_a_bench_makes_all_of_its_steps_where_a_run_ends_after_some_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: dict[str, StageSettings] = {}

    def run(self: Bench, plan: StagePlan, settings: StageSettings, *_: object, **__: object) -> NoReturn:
        measured[plan.node.name] = settings
        raise StageFailed("not run")

    monkeypatch.setattr(Bench, "_run", run)
    config = load_experiment(SMOKE, ["sft={steps: 9, epochs: null, max_tokens: 10}", "rl.max_tokens=10"])
    experiment = open_experiment(config, Workspace(tmp_path), code=lambda rooms: {})
    inputs = BenchInputs(*[tmp_path] * 4, own_data=False, own_base=False, own_rl_start=False, words=())
    bench = Bench(experiment, tmp_path, inputs, BenchOptions(steps=4))
    for plan in experiment.plan():
        if plan.node.name in ("sft", "rl"):
            with pytest.raises(StageFailed):
                bench.measure(plan)
    sft, rl = measured["sft"].sft, measured["rl"].rl  # type: ignore[attr-defined]
    assert (sft.steps, sft.max_tokens, rl.steps, rl.max_tokens) == (9, None, 5, None)

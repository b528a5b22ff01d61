"""A bench of all stages of an experiment that can be measured, and of other layouts."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from luffy.config import ExperimentConfig
from luffy.costs.bench_inputs import BenchInputs, find_inputs, make_quick_stages
from luffy.costs.bench_run import Bench, BenchOptions, scratch_folder, started_as_in_a_run
from luffy.costs.layouts import TrialLayout, splits, zero_stages
from luffy.costs.measurable import choose
from luffy.costs.readings import Reading
from luffy.errors import EXIT_INTERRUPTED, StageFailed
from luffy.pipeline.chain.plan import StagePlan
from luffy.pipeline.experiment import StageObserver, open_experiment
from luffy.pipeline.workspace import Workspace


@dataclass(frozen=True, slots=True)
class OpenBench:
    """The stages of an experiment, ready to be measured."""

    bench: Bench | None
    """None where no stage can be measured."""
    config: ExperimentConfig
    workspace: Workspace
    options: BenchOptions
    scratch: Path
    inputs: BenchInputs | None
    plans: Sequence[StagePlan]
    """Plans of the stages to measure."""
    refusals: Sequence[str]
    """The reason, in one line, for each stage of a run that is not measured."""

    def measure(self, plan: StagePlan) -> Reading | str:
        """The reading of one stage, kept for later plans; or one line that says why there is none."""
        assert self.bench is not None
        reading = _measured(self.bench, plan)
        if isinstance(reading, Reading):
            self.bench.keep(plan, reading)
        return reading

    def try_layouts(self, tried: Callable[[TrialLayout, Reading | str], None]) -> TrialLayout | None:
        """The layout with the fastest step of RL (without RL, of SFT); None where there is only one, or none ran.

        First every split of the GPUs, then every ZeRO stage at the fastest split. `tried` is called with each.
        """
        plan = next((plan for stage in ("rl", "sft") for plan in self.plans if plan.node.stage == stage), None)
        if plan is None or len(splits(self.config)) == len(zero_stages(self.config)) == 1:
            return None
        seconds: dict[str, float] = {}
        fastest = TrialLayout("", self.config)
        for choices in (splits, zero_stages):
            layouts = choices(fastest.config)
            for layout in layouts:
                if layout.words not in seconds:
                    reading = _measured(self._bench_of(layout.config), plan)
                    tried(layout, reading)
                    known = reading.step_s if isinstance(reading, Reading) else None
                    seconds[layout.words] = math.inf if known is None else known
            fastest = min(layouts, key=lambda layout: seconds[layout.words])
        return fastest if math.isfinite(seconds[fastest.words]) else None

    def _bench_of(self, config: ExperimentConfig) -> Bench:
        assert self.inputs is not None
        return Bench(open_experiment(config, self.workspace), self.scratch, self.inputs, self.options)


@contextmanager
def open_bench(
    config: ExperimentConfig, workspace: Workspace, options: BenchOptions, observer: StageObserver
) -> Iterator[OpenBench]:
    """Find or make what the bench reads; `observer` is told of the stages that are made for it.

    Raises UserError for inputs that cannot be made, StageFailed where making them fails.
    """
    workspace.prepare()
    experiment = open_experiment(config, workspace)
    with scratch_folder(workspace) as scratch, started_as_in_a_run(scratch):
        wanted, refusals = choose(config, experiment.plan())
        bench = inputs = None
        if wanted:
            made = scratch / "made"
            made.mkdir()
            make_quick_stages(experiment, made, observer)
            plans = experiment.plan()
            inputs = find_inputs(config, {plan.node.name: plan for plan in plans}, scratch / "stand_ins")
            bench = Bench(experiment, scratch, inputs, options)
            wanted, refusals = choose(config, plans)
        yield OpenBench(bench, config, workspace, options, scratch, inputs, wanted, refusals)


def _measured(bench: Bench, plan: StagePlan) -> Reading | str:
    try:
        return bench.measure(plan)
    except StageFailed as failure:
        if failure.exit_code == EXIT_INTERRUPTED:
            raise
        return f"{plan.node.name}: not measured: {str(failure).splitlines()[0]}"

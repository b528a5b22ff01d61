"""A bench of all stages of an experiment that can be measured, and of other layouts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from luffy.config import ExperimentConfig
from luffy.costs.bench_inputs import BenchInputs, find_inputs, make_quick_stages
from luffy.costs.bench_run import Bench, BenchOptions, scratch_folder, started_as_in_a_run
from luffy.costs.layouts import TrialLayout, splits, zero_stages
from luffy.costs.readings import Reading
from luffy.errors import EXIT_INTERRUPTED, StageFailed
from luffy.pipeline.chain.plan import StagePlan
from luffy.pipeline.experiment import StageObserver, open_experiment
from luffy.pipeline.workspace import Workspace

_ELSEWHERE = "the engine openai generates on servers elsewhere, whose weights a bench would have to replace"
_NOT_TIMED = {
    "prepare_data": "it neither trains nor generates",
    "report": "it neither trains nor generates",
    "difficulty": "it ends its stage with the prompts that it keeps; it generates as fast as an evaluation",
}


@dataclass(frozen=True, slots=True)
class OpenBench:
    """The stages of an experiment, ready to be measured."""

    config: ExperimentConfig
    workspace: Workspace
    options: BenchOptions
    scratch: Path
    inputs: BenchInputs | None
    """None where no stage can be measured."""
    plans: Sequence[StagePlan]
    """Those to measure: one of each kind."""
    refusals: Sequence[str]
    """A line for each other stage that a run would make."""

    def measure(self, plan: StagePlan) -> Reading | str:
        """The reading of one stage, kept for later plans; or why there is none, in one line."""
        return self._measured(self.config, plan, keep=True)

    def try_layouts(self, tried: Callable[[TrialLayout, Reading | str], None]) -> TrialLayout | None:
        """The layout with the fastest step of RL (without RL, of SFT); None where there is only one.

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
                    reading = self._measured(layout.config, plan, keep=False)
                    tried(layout, reading)
                    known = isinstance(reading, Reading) and reading.step_s is not None
                    seconds[layout.words] = reading.step_s if known else float("inf")
            fastest = min(layouts, key=lambda layout: seconds[layout.words])
        return fastest

    def _measured(self, config: ExperimentConfig, plan: StagePlan, *, keep: bool) -> Reading | str:
        assert self.inputs is not None
        bench = Bench(open_experiment(config, self.workspace), self.scratch, self.inputs, self.options)
        try:
            reading = bench.measure(plan)
        except StageFailed as failure:
            if failure.exit_code == EXIT_INTERRUPTED:
                raise
            return f"{plan.node.name}: not measured: {str(failure).splitlines()[0]}"
        if keep:
            bench.keep(plan, reading)
        return reading


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
        inputs = None
        if wanted:
            made = scratch / "made"
            made.mkdir()
            make_quick_stages(experiment, made, observer)
            plans = experiment.plan()
            inputs = find_inputs(config, {plan.node.name: plan for plan in plans}, scratch / "stand_ins")
            wanted, refusals = choose(config, plans)
        yield OpenBench(config, workspace, options, scratch, inputs, wanted, refusals)


def choose(config: ExperimentConfig, plans: Sequence[StagePlan]) -> tuple[list[StagePlan], list[str]]:
    """The stages to measure, one of each kind that a run would make; and a line for each kind that cannot be."""
    chosen: dict[str, StagePlan] = {}
    refusals: dict[str, str] = {}
    for plan in plans:
        stage = plan.node.stage
        if plan.action == "reuse":
            continue
        if (reason := _refusal(config, stage)) is not None:
            refusals.setdefault(stage, f"{stage}: not measured: {reason}")
        else:
            chosen.setdefault(stage, plan)
    return list(chosen.values()), list(refusals.values())


def _refusal(config: ExperimentConfig, stage: str) -> str | None:
    """Why a stage cannot be measured; None where it can."""
    if stage == "base" and config.model.architecture is None:
        return "it trains nothing"
    section = {"rl": config.rl, "evaluate": config.evaluation}.get(stage)
    if section is not None and section.engine == "openai":
        return _ELSEWHERE
    return _NOT_TIMED.get(stage)

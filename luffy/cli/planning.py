"""What a run would do with each stage, and whether it can be started at all."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from luffy.cli.console import memory_table, plan_table, say, terminal, text_table, wide_terminal
from luffy.config import ExperimentConfig
from luffy.config.arm_run import ArmRun
from luffy.config.comparison import Comparison
from luffy.config.grid_experiment import GridExperiment
from luffy.costs.forecast import StageForecast, forecast
from luffy.costs.measurable import choose
from luffy.errors import ConfigError
from luffy.pipeline.chain.plan import StagePlan
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.machine.gpus import detected_gpus, gpus_of_stage
from luffy.pipeline.machine.resources import find_resources
from luffy.pipeline.workspace import Workspace

_RUNS_HEADER = ("run", "stage", "key", "plan", "why")


def show_plan(
    config: ExperimentConfig, workspace: Workspace, *, verify: bool, sweep_steps: tuple[int, ...] = ()
) -> None:
    """Print what a run would do with each stage, on how many GPUs, why, and in what time; first its GPUs' memory.

    Raises ConfigError, after the estimate, where that cannot fit.
    """
    show_resources(config, estimate=True, sweep_steps=sweep_steps)
    plans = plans_of(config, workspace, verify=verify, sweep_steps=sweep_steps)
    console = terminal()
    if config.cluster == "ray":
        console.print()
    say(f"workspace {workspace.root}")
    forecasts = forecast(config, plans, workspace)
    console.print(plan_table(plans, forecasts, _gpus_of_stages(config, plans)))
    for line in _forecast_notes(config, plans, forecasts):
        say(line)


def _forecast_notes(
    config: ExperimentConfig, plans: Sequence[StagePlan], forecasts: Sequence[StageForecast]
) -> list[str]:
    """Where the times come from, and what would give those that are not known."""
    sources = dict.fromkeys(each.source for each in forecasts if each.seconds)
    notes = [f"times: {', '.join(sources)}"] if sources else []
    unknown = [plan for plan, each in zip(plans, forecasts, strict=True) if each.seconds is None]
    if choose(config, unknown)[0]:
        notes.append("- : not measured yet; luffy bench, with the same experiment and overrides, measures it")
    return notes


def show_comparison_plan(comparison: Comparison, workspace: Workspace, *, verify: bool) -> None:
    """The same for all runs of a comparison; a stage that several runs share stands where it comes first."""
    for config in arm_configs(comparison):
        show_resources(config, estimate=True)
    say(f"workspace {workspace.root}")
    _show_titled(_titled_plans(comparison, workspace, verify))
    if comparison.tuning_runs:
        num_tuning = len(comparison.tuning_runs)
        say(f"{num_tuning} runs to tune, then {comparison.num_runs - num_tuning} with the values that they choose")


def plans_of(
    config: ExperimentConfig, workspace: Workspace, *, verify: bool, sweep_steps: tuple[int, ...] = ()
) -> Sequence[StagePlan]:
    """The decision for every stage; raises LuffyError where it cannot be known yet."""
    return open_experiment(config, workspace, verify=verify, sweep_steps=sweep_steps).plan()


def comparison_plans(comparison: Comparison, workspace: Workspace, *, verify: bool) -> Sequence[StagePlan]:
    """The decision for every stage of a comparison, each stage once."""
    return [plan for _, plan in _titled_plans(comparison, workspace, verify)]


def check(config: ExperimentConfig, workspace: Workspace, *, sweep_steps: tuple[int, ...] = ()) -> None:
    """Raise UserError where a file is missing or the machines are too small, before anything is started."""
    show_resources(config, estimate=False, sweep_steps=sweep_steps)
    # Finds missing files; the flow computes the keys.
    open_experiment(config, workspace, fingerprint=lambda stage: {}, sweep_steps=sweep_steps)


def arm_configs(comparison: Comparison) -> list[ExperimentConfig]:
    """One experiment of each arm; its seeds and tries differ in nothing that has to be checked."""
    return [comparison.runs_of(name)[0].config for name in comparison.config.arms]


def show_resources(config: ExperimentConfig, *, estimate: bool, sweep_steps: tuple[int, ...] = ()) -> None:
    """Print what a run needs of its machines, with or without the `estimate` of each GPU's memory.

    A sweep needs nothing for training, since its RL run is finished. Raises ConfigError, a line a mistake, where the
    machines do not have it.
    """
    resources = find_resources(config, ("sweep",) if sweep_steps else None)
    console = terminal()
    for gpu in resources.gpus if estimate else ():
        console.print(memory_table(gpu))
        console.print()
    for note in resources.notes:
        say(note)
    if resources.complaints:
        raise ConfigError("\n".join(resources.complaints))


def _gpus_of_stages(config: ExperimentConfig, plans: Sequence[StagePlan]) -> dict[str, int] | None:
    """The GPUs that each stage takes, by node; None where neither this machine nor the experiment has any."""
    if config.cluster == "local" and not detected_gpus():
        return None
    return {plan.node.name: gpus_of_stage(config, plan.node.stage) for plan in plans}


def show_grid_plan(grid: GridExperiment, workspace: Workspace, *, verify: bool) -> None:
    """The same for all points of a grid; a stage that several points share stands where it comes first."""
    for config in grid.experiments:
        show_resources(config, estimate=True)
    say(f"workspace {workspace.root}")
    _show_titled(_plans_of_runs(grid.runs, workspace, verify))


def grid_plans(grid: GridExperiment, workspace: Workspace, *, verify: bool) -> Sequence[StagePlan]:
    """The decision for every stage of a grid, each stage once."""
    return [plan for _, plan in _plans_of_runs(grid.runs, workspace, verify)]


def _show_titled(plans: Iterable[tuple[str, StagePlan]]) -> None:
    rows = [(title, plan.node.name, plan.identity.key, plan.headline, plan.reason) for title, plan in plans]
    wide_terminal().print(text_table(_RUNS_HEADER, rows))


def _titled_plans(comparison: Comparison, workspace: Workspace, verify: bool) -> Iterator[tuple[str, StagePlan]]:
    seen: set[str] = set()
    for plan in plans_of(comparison.shared, workspace, verify=verify):
        seen.add(plan.identity.key)
        yield "all", plan
    yield from _plans_of_runs(comparison.runs, workspace, verify, seen)


def _plans_of_runs(
    runs: Iterable[ArmRun], workspace: Workspace, verify: bool, seen: Collection[str] = ()
) -> Iterator[tuple[str, StagePlan]]:
    """Each stage once, by the title of the first run that has it; without those whose keys were `seen`."""
    known = set(seen)
    for run in runs:
        for plan in plans_of(run.config, workspace, verify=verify):
            if plan.node.name in run.nodes and plan.identity.key not in known:
                known.add(plan.identity.key)
                yield run.title, plan

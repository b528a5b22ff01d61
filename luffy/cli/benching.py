"""A bench on the terminal: measures, prints each finding as it comes, and ends with the forecast."""

from luffy.cli.bench_view import show_forecast, show_layout, show_reading
from luffy.cli.console import say, stage_display
from luffy.cli.planning import check
from luffy.config import ExperimentConfig
from luffy.costs.bench_run import BenchOptions
from luffy.costs.bench_stages import OpenBench, open_bench
from luffy.costs.forecast import forecast
from luffy.costs.workloads import this_machine
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace


def run_bench(config: ExperimentConfig, workspace: Workspace, options: BenchOptions, *, layouts: bool) -> bool:
    """Returns whether every stage was measured that can be."""
    check([config], workspace)
    say(f"{config.name} on {this_machine()}")
    complete = True
    with stage_display(["prepare_data", "base"]) as display, open_bench(config, workspace, options, display) as opened:
        for line in opened.inputs.words if opened.inputs is not None else ():
            say(line)
        for plan in opened.plans:
            outcome = opened.measure(plan)
            if isinstance(outcome, str):
                say(outcome)
                complete = False
            else:
                show_reading(outcome, config)
        for line in opened.refusals:
            say(line)
        if layouts and opened.inputs is not None:
            _show_layouts(opened)
    say("")
    show_forecast(forecast(config, open_experiment(config, workspace).plan(), workspace))
    return complete


def _show_layouts(opened: OpenBench) -> None:
    say("layouts")
    fastest = opened.try_layouts(show_layout)
    say(
        f"  fastest: {fastest.words}"
        if fastest is not None
        else "  no placement other than the configured one is possible, or none could be measured"
    )

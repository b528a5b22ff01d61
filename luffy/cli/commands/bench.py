"""`luffy bench CONFIG`: what a run will cost, measured by a few steps of its stages."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from luffy.cli.console import duration, say, stage_display, terminal, text_table
from luffy.cli.options import Config, Debug, Overrides, WorkspaceFolder
from luffy.cli.planning import check
from luffy.config import load_experiment
from luffy.errors import EXIT_FAILURE, EXIT_OK
from luffy.pipeline.workspace import find_workspace

if TYPE_CHECKING:
    from luffy.costs.bench import StageCost

_ASSUMED = (
    "responses are as long, and as often correct, as those of the present policy, the newest finished one that a stage "
    "starts from; training changes both"
)


def bench(
    config: Config,
    overrides: Overrides = None,
    steps: Annotated[int, Option(min=1, help="steps of SFT and RL to measure after the first")] = 4,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Measure what a run will cost, by a few steps of its stages.

    Prints step time, peak memory, and the time of every whole stage. Makes data and starting policy first; the run
    reuses both.
    """
    from luffy.costs.bench import MADE_FIRST, open_bench

    experiment, where, costs = load_experiment(config, overrides or ()), find_workspace(workspace), []
    check([experiment], where)
    with stage_display([*MADE_FIRST]) as display, open_bench(experiment, where, steps, display) as opened:
        say(f"{experiment.name}: {_ASSUMED}")
        for cost in opened.costs():
            say(f"{cost.node}: {cost.words}")
            costs.append(cost)
    say("")
    _show(costs)
    return EXIT_FAILURE if any(cost.state == "failed" for cost in costs) else EXIT_OK


def _show(costs: Sequence["StageCost"]) -> None:
    """The time of each whole stage; below, of all stages and of those that a run has yet to make."""
    has_gpus = any(cost.gpus for cost in costs)

    def row(name: str, some: Sequence["StageCost"], memory: str = "") -> list[str]:
        seconds = [cost.seconds for cost in some if cost.seconds is not None]
        hours = sum(cost.gpu_hours or 0.0 for cost in some)
        time = duration(sum(seconds)) if seconds or not some else "-"
        return [name, time, *([f"{hours:.2f}"] if has_gpus else []), memory]

    rows = [row(cost.node, [cost], cost.memory) for cost in costs]
    rows += [row("all", costs), row("still to run", [cost for cost in costs if cost.state != "finished"])]
    terminal().print(text_table(["stage", "time", *(["GPU-hours"] if has_gpus else []), "peak memory"], rows))
    if missing := [cost.node for cost in costs if cost.seconds is None]:
        say(f"without {', '.join(missing)}, whose time is not known")

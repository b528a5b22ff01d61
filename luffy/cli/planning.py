"""The plan of a run: what it would do with each stage, and whether it can start.

One experiment: `show_plan`. All runs of a comparison, a grid or a study: `show_sweep_plan`; there a
stage that several runs share is listed once, with the first of them.
"""

from collections.abc import Collection, Iterator, Sequence

from luffy.cli.console import memory_table, plan_table, say, show_rows, terminal
from luffy.config import ExperimentConfig
from luffy.config.chain import StageNode
from luffy.config.many_runs.sweep_runs import Sweep
from luffy.errors import ConfigError
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.gpus import detected_gpus, gpus_of_stage
from luffy.pipeline.graph import build_graph
from luffy.pipeline.manifest import Manifest, read_manifest
from luffy.pipeline.plan import StagePlan, similar_results
from luffy.pipeline.resources import find_resources
from luffy.pipeline.workspace import Workspace


def show_plan(
    config: ExperimentConfig,
    workspace: Workspace,
    *,
    verify: bool,
    sweep_steps: tuple[int, ...] = (),
    only: Collection[str] = (),
    adopts: bool = False,
) -> None:
    """Print the estimate of GPU memory, then for each stage what a run would do, why, and on how many GPUs.

    Also how long the most similar finished result of the stage took. GPUs are left out where neither this machine nor
    the experiment has any. With `only`, the stages (nodes) that a run would be asked to make, for these and what they
    are made from. Raises ConfigError, after printing the estimate, if the run does not fit in memory.
    """
    experiment = open_experiment(config, workspace, verify=verify, sweep_steps=sweep_steps)
    chosen = [node for node in experiment.nodes if node.name in only or (sweep_steps and node.stage == "sweep")]
    show_resources([config], estimate=True, nodes=chosen or None)
    chain = experiment.chain_of(only, adopts=adopts)
    plans = [plan for plan in experiment.plan(adopts=adopts) if plan.node in chain]
    console = terminal()
    if config.cluster == "ray":
        console.print()
    say(f"workspace {workspace.root}")
    found: dict[str, Manifest] = {}
    for plan in (plan for plan in plans if plan.action not in ("reuse", "adopt")):
        siblings, node = workspace.siblings(plan.node.stage), plan.node
        # The finished results of this stage that differ least come first; among equals the newest.
        alike = similar_results(siblings, config.name, node.name, plan.identity, node.inputs)
        if manifest := next(filter(None, (read_manifest(directory) for directory, *_ in alike)), None):
            found[node.name] = manifest
    gpus = None
    if config.cluster != "local" or detected_gpus():
        gpus = {plan.node.name: gpus_of_stage(plan.node.config, plan.node.stage) for plan in plans}
    console.print(plan_table(plans, {name: manifest.total_s for name, manifest in found.items()}, gpus))
    if found:
        sources = ", ".join(dict.fromkeys(f"{manifest.stage} {manifest.key}" for manifest in found.values()))
        say(f"took: the time of the most similar finished result of this experiment ({sources})")


def show_sweep_plan(sweep: Sweep, workspace: Workspace, cells: Sequence[str], *, verify: bool) -> None:
    """Print the plan of all runs in these cells of a design, as far as they are known before tuning."""
    show_resources(sweep.started_with(cells), estimate=True)
    say(f"workspace {workspace.root}")
    rows = [
        (title, plan.node.name, plan.identity.key, plan.headline, plan.reason)
        for title, plan in plans_of_runs(sweep, workspace, cells, verify=verify)
    ]
    show_rows(("run", "stage", "key", "plan", "why"), rows)
    if num_tuning := len(sweep.tuning_runs(cells)):
        say(f"{num_tuning} runs for tuning, then {len(sweep.reported_runs(cells))} with the chosen values")


def check(
    configs: Sequence[ExperimentConfig],
    workspace: Workspace,
    *,
    sweep_steps: tuple[int, ...] = (),
    nodes: Sequence[StageNode] | None = None,
) -> None:
    """Raise UserError if a file is missing or the machines are too small for `nodes` (all), before anything starts."""
    for config in configs:
        sweep = [node for node in build_graph(config, sweep_steps) if node.stage == "sweep"]
        show_resources([config], estimate=False, nodes=sweep or nodes)
        # Finds missing files. Code is not hashed here: the flow computes the keys.
        open_experiment(config, workspace, code=lambda kind, rooms: {}, sweep_steps=sweep_steps)


def show_resources(
    configs: Sequence[ExperimentConfig], *, estimate: bool, nodes: Sequence[StageNode] | None = None
) -> None:
    """Print notes on the machines that the runs need, with or without the `estimate` of each GPU's memory, each once.

    `nodes`: the stages to check, by default all. Raises ConfigError, one line for each problem, if the machines do not
    suffice.
    """
    found = [find_resources(config, nodes) for config in configs]
    console = terminal()
    for gpu in dict.fromkeys(gpu for each in found for gpu in each.gpus) if estimate else ():
        console.print(memory_table(gpu))
        console.print()
    for note in dict.fromkeys(note for each in found for note in each.notes):
        say(note)
    if complaints := dict.fromkeys(complaint for each in found for complaint in each.complaints):
        raise ConfigError("\n".join(complaints))


def plans_of_runs(
    sweep: Sweep, workspace: Workspace, cells: Sequence[str], *, verify: bool
) -> Iterator[tuple[str, StagePlan]]:
    """Each stage once, with the title of the first run that contains it; `all`: made before any run of a comparison."""
    known = set[str]()
    for plan in open_experiment(sweep.common(), workspace, verify=verify).plan() if sweep.design.arms else ():
        known.add(plan.identity.key)
        yield "all", plan
    for run in sweep.tuning_runs(cells) or sweep.reported_runs(cells):
        for plan in open_experiment(run.config, workspace, verify=verify).plan():
            if plan.node.name in run.nodes and plan.identity.key not in known:
                known.add(plan.identity.key)
                yield run.title, plan

"""The shared part of commands that run an experiment or a part of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from luffy.cli.planning import check, plans_of, show_plan
from luffy.config import ExperimentConfig
from luffy.errors import EXIT_OK
from luffy.flows.launch import launch
from luffy.pipeline.workspace import Workspace


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options of every command that starts a flow."""

    workspace: Workspace
    dry_run: bool
    verify: bool
    debug: bool


def start_experiment(
    flow: str,
    config: ExperimentConfig,
    parameters: Mapping[str, object],
    options: StartOptions,
    *,
    sweep_steps: tuple[int, ...] = (),
    stages: Sequence[str] | None = None,
) -> int:
    """Check `config`, then run `flow` with the equivalent `parameters`, or show the plan. Returns the exit code.

    `stages`: those whose needs are checked, by default all.
    """
    workspace, verify = options.workspace, options.verify
    if options.dry_run:
        show_plan(config, workspace, verify=verify, sweep_steps=sweep_steps, stages=stages)
        return EXIT_OK
    check([config], workspace, sweep_steps=sweep_steps, stages=stages)
    plans = partial(plans_of, config, workspace, verify=verify, sweep_steps=sweep_steps)
    return launch(flow, {**parameters, "verify": verify}, workspace, plans, debug=options.debug)

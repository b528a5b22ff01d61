"""Runs a grid, a comparison of methods or a study: many runs of one experiment, and one page about all of them.

Stages that runs share (data, base policy and its evaluation, a seed's SFT start) are made once. A failed run does not
stop the others; the same command tries it again and reuses the rest. A study, which goes on for days on several
machines, does not start finished runs again.
`python flows/run_sweep.py compare CONFIG` is `luffy compare CONFIG`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script()

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from luffy.cli.console import say, show_table
from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.evaluation.across_runs.sweep_findings import Findings
from luffy.pipeline.resources import check_resources
from luffy.pipeline.workspace import find_workspace
from luffy.report.sweep_pages import accuracy_table, cost_table, difference_table, tries_table, tuning_costs
from luffy.tasks.many_runs import open_runs, raise_failures, run_arms, run_cells


def _run_name() -> str:
    parameters = flow_run.get_parameters()
    given = [text for name in ("overrides", "over", "cells") for text in parameters.get(name) or []]
    return " ".join([Path(parameters["config_file"]).stem, *given])


@flow(name="run-sweep", flow_run_name=_run_name, retries=0, persist_result=False)
def run_sweep(
    config_file: str,
    overrides: list[str] | None = None,
    over: list[str] | None = None,
    seeds: list[int] | None = None,
    cells: list[str] | None = None,
    verify: bool = False,
) -> None:
    """Execute all runs of a grid, a comparison or a study, in the workspace of LUFFY_WORKSPACE.

    Args:
        config_file: YAML file of a grid, a comparison, a study or an experiment, or the name of a shipped one.
        overrides: Values that differ from the file, each as `key.path=value`, such as `rl.steps=200`.
        over: For an experiment, the values of the grid around it, each as `key.path=[VALUE, ...]`.
        seeds: For an experiment, the seeds of every point.
        cells: For a study, the cells to run; empty for all of them.
        verify: Compare full hashes of earlier results before they are reused.
    """
    sweep = load_sweep(config_file, overrides or [], over or [], seeds or [])
    selected = sweep.selected(cells or [])
    sweep.check(selected)
    for config in sweep.started_with(selected):
        check_resources(config)
    with open_runs(sweep, selected, find_workspace(), verify=verify) as running:
        if not sweep.design.cells:
            findings = run_arms(running, sweep)
            _show(findings)
            say(f"report: {running.folder}/{sweep.design.kind}.html")
            raise_failures(findings.failures, len(sweep.tuning_runs()) + len(sweep.reported_runs()))
            return
        run_cells(running, sweep, selected)


def _show(findings: Findings) -> None:
    for decoding in findings.decodings:
        show_table(accuracy_table(findings, decoding), f"Accuracy in %, {decoding}: mean with its interval (each seed)")
        if (differences := difference_table(findings, decoding)) is not None:
            show_table(differences, "Percentage points, p-values after Holm's correction")
    show_table(cost_table(findings), "Costs of a seed, mean over seeds")
    for line in findings.off_budget:
        say(line)
    if findings.tuning is not None:
        show_table(tries_table(findings.tuning), "What was tried, accuracy in %")
        show_table(tuning_costs(findings.tuning), "Costs of tuning")
        for line in findings.tuning.warnings:
            say(line)

"""Runs one experiment at every point of a grid, with several seeds, and writes one page with plots and costs.

Stages that points share (data, base policy, an SFT of equal settings) are made once. A failed run does not stop the
others; the same command tries it again and reuses the rest.
`python flows/run_grid.py CONFIG` is `luffy grid CONFIG`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("grid")

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from luffy.cli.console import show_report_path, show_table
from luffy.config.many_runs.grid_experiment import load_grid
from luffy.evaluation.grid_findings import GridFindings
from luffy.pipeline.resources import check_resources
from luffy.pipeline.workspace import find_workspace
from luffy.report.sweep_pages import grid_costs, grid_table
from luffy.tasks.grid_runs import PAGE_FILE, conclude_grid, open_grid
from luffy.tasks.many_runs import raise_failures, run_all


def _run_name() -> str:
    """Name of the run in the UI: the grid and its overrides."""
    parameters = flow_run.get_parameters()
    given = [*(parameters["overrides"] or []), *(parameters["over"] or [])]
    return " ".join([Path(parameters["config_file"]).stem, *given])


@flow(name="run-grid", flow_run_name=_run_name, retries=0, persist_result=False)
def run_grid(
    config_file: str,
    overrides: list[str] | None = None,
    over: list[str] | None = None,
    seeds: list[int] | None = None,
    verify: bool = False,
) -> None:
    """Run an experiment over a grid of values with several seeds, in the workspace of LUFFY_WORKSPACE.

    Args:
        config_file: YAML file of a grid or of an experiment, or the name of a shipped one.
        overrides: Values that differ from the file, each as `key.path=value`, such as `rl.steps=200`.
        over: For an experiment, the values of the grid, each as `key.path=[VALUE, ...]`.
        seeds: For an experiment, the seeds of every point.
        verify: Compare full hashes of earlier results before they are reused.
    """
    grid = load_grid(config_file, overrides or [], over or [], seeds or [])
    for experiment in grid.experiments:
        check_resources(experiment)
    with open_grid(grid, find_workspace(), verify=verify) as running:
        outcomes = run_all(running, grid.runs, {})
        findings = conclude_grid(running, grid, outcomes)
        _show(findings)
        show_report_path(running.folder / PAGE_FILE)
        raise_failures(findings.failures, len(grid.runs))


def _show(findings: GridFindings) -> None:
    for decoding in findings.decodings:
        show_table(grid_table(findings, decoding), f"Accuracy in %, {decoding}: mean with its interval (each seed)")
    show_table(grid_costs(findings), "Costs of a seed, mean over seeds")

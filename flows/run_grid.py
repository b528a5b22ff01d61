"""One experiment over a grid of values, each point with several seeds: one page with lines, or maps, and costs.

Stages that points share (data, base policy, an SFT of equal settings) are made once. A failed run is shown as failed
and the others go on; the same command again tries it once more and reuses the rest.
`python flows/run_grid.py CONFIG` is `luffy grid CONFIG`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("grid")

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from luffy.cli.console import show_report_path, text_table, wide_terminal
from luffy.config.grid_experiment import load_grid
from luffy.errors import LuffyError
from luffy.evaluation.grid_findings import GridFindings
from luffy.pages.grid_page import grid_costs, grid_table
from luffy.pages.tables import plain_table
from luffy.pipeline.machine.resources import check_resources
from luffy.pipeline.workspace import find_workspace
from luffy.tasks.grid_runs import PAGE_FILE, conclude_grid, open_grid
from luffy.tasks.many_runs import run_all


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
    """Run the grid in `config_file`, or the experiment in it `over` values, in the workspace of LUFFY_WORKSPACE."""
    grid = load_grid(config_file, overrides or [], over or [], seeds or [])
    for experiment in grid.experiments:
        check_resources(experiment)
    with open_grid(grid, find_workspace(), verify=verify) as running:
        outcomes = run_all(running, grid.runs, {})
        findings = conclude_grid(running, grid, outcomes)
        _show(findings)
        show_report_path(running.folder / PAGE_FILE)
        if findings.failures:
            failed = f"{len(findings.failures)} of {len(grid.runs)} runs have failed"
            raise LuffyError("\n".join([f"{failed}; the same command tries them again:", *findings.failures]))


def _show(findings: GridFindings) -> None:
    out = wide_terminal()
    for decoding in findings.decodings:
        title = f"\nAccuracy in %, {decoding}: mean with its interval (each seed)"
        out.print(text_table(*plain_table(grid_table(findings, decoding)), title=title))
    out.print(text_table(*plain_table(grid_costs(findings)), title="\nCosts of a seed, mean over seeds"))

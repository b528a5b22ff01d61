"""Runs a study: methods compared in many cells around a centre, resumable across days and machines.

Finished runs are not started again. A failed run does not stop the others; the same command tries it again.
`python flows/run_study.py DESIGN` is `luffy study DESIGN`.
"""

if __name__ == "__main__":
    from luffy.cli.main import script

    script("study")

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from luffy.cli.console import say
from luffy.config.many_runs.study import load_study
from luffy.evaluation.study.study_results import read_study_results, result_files
from luffy.pipeline.resources import check_resources
from luffy.pipeline.workspace import find_workspace
from luffy.tasks.many_runs import raise_failures
from luffy.tasks.study_cells import open_study, run_cells


def _run_name() -> str:
    """Name of the run in the UI: the design and its cells."""
    parameters = flow_run.get_parameters()
    return " ".join([Path(parameters["design_file"]).stem, *(parameters["cells"] or [])])


@flow(name="run-study", flow_run_name=_run_name, retries=0, persist_result=False)
def run_study(
    design_file: str,
    cells: list[str] | None = None,
    budget_hours: float | None = None,
    verify: bool = False,
    as_committed: bool = False,
) -> None:
    """Execute the unfinished runs of a study, in the workspace of LUFFY_WORKSPACE.

    Args:
        design_file: YAML file of a study, or the name of a shipped one.
        cells: Cells to run; empty for all of them.
        budget_hours: No run starts later than this after the first.
        verify: Compare full hashes of earlier results before they are reused.
        as_committed: Take the tuned values from the committed results instead of tuning again.
    """
    study = load_study(design_file)
    selected = study.selected(cells or [])
    study.check(selected)
    for candidate in study.comparison(selected[0]).candidates:
        check_resources(candidate.config)
    chosen = None
    if as_committed:
        chosen = read_study_results(result_files(study.path, study.config.name)).chosen_for(study, selected)
    with open_study(study, selected, find_workspace(), verify=verify) as running:
        outcome = run_cells(running, study, selected, chosen=chosen, budget_hours=budget_hours)
    raise_failures(outcome.failures, outcome.num_runs)
    if outcome.is_out_of_time:
        say(f"the budget of {budget_hours:g} hours is spent; {outcome.num_left} runs are left; repeat the command")

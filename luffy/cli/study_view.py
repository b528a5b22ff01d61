"""What `luffy compare` writes of a study without starting a run: the parquet files and the page."""

from luffy.cli.console import say
from luffy.config.many_runs.sweep_runs import Sweep
from luffy.errors import DataError, UserError
from luffy.evaluation.across_runs.run_results import (
    REPORTED,
    TRIED,
    joined_results,
    read_sweep_results,
    result_files,
    write_results,
)
from luffy.evaluation.across_runs.sweep_findings import SweepProgress, find
from luffy.files import write_atomic
from luffy.pipeline.workspace import Workspace
from luffy.report.page import html
from luffy.report.sweep_pages import study_figure, study_markdown, study_page


def collect_results(study: Sweep, workspace: Workspace, *, verify: bool) -> None:
    """Add the finished results of all cells to those beside the design.

    Raises UserError where no run is finished, or where the files hold another result of one of them.
    """
    progress = SweepProgress(study, workspace, verify=verify)
    reported = study.reported_runs(study.cells, progress.chosen(study.cells))
    results = progress.collect([*study.tuning_runs(study.cells), *reported])
    if results.outcomes.empty:
        raise UserError(f"workspace {workspace.root}: no run of {study.design.name} is finished; nothing is written")
    files = result_files(study.path, study.design.name)
    if any(path.exists() for path in files):
        try:
            in_design = read_sweep_results(files).where(cell=study.cells, arm=("", *study.design.arms))
            results = joined_results(in_design, results)
        except DataError as error:
            raise UserError(
                f"{files[0]}: does not go with workspace {workspace.root} ({error}); delete "
                f"{files[0].name} and {files[1].name} to write only the results of this workspace"
            ) from None
    write_results(results, files)
    runs = results.where(role=(REPORTED, TRIED)).outcomes[["cell", "role", "arm", "point", "seed"]]
    num_runs = len(runs.drop_duplicates())
    for path in files:
        say(f"{path}: {num_runs} runs, {path.stat().st_size:,} bytes")


def write_pages(study: Sweep) -> None:
    """Write the page, the figure and the tables beside the design, out of the parquet files."""
    results = read_sweep_results(result_files(study.path, study.design.name))
    findings, folder, name = find(study, results), study.path.parent, study.design.name
    write_atomic(folder / f"{name}.html", html(study_page(findings, results)))
    write_atomic(folder / f"{name}.results.md", study_markdown(findings, results))
    write_atomic(folder / f"{name}.svg", study_figure(findings))
    say(f"report: {folder}/{name}.html")

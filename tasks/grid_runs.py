"""One experiment over a grid of values under Prefect: a run for each point and seed, and the page."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prefect import task
from prefect.cache_policies import NO_CACHE

from luffy.cli.console import stage_title
from luffy.config.many_runs.arm_run import folder_of
from luffy.config.many_runs.grid_experiment import GridExperiment
from luffy.evaluation.grid_findings import GridFindings, PointResult, grid_json
from luffy.files import write_atomic
from luffy.pipeline.workspace import Workspace
from luffy.report.page import html
from luffy.report.sweep_pages import grid_costs, grid_page, grid_table
from luffy.tasks.many_runs import (
    ManyRuns,
    RunOutcome,
    offer_artifacts,
    open_runs,
    page_artifact,
    parted,
    table_artifact,
)

PAGE_FILE = "grid.html"
DATA_FILE = "grid.json"


@contextmanager
def open_grid(grid: GridExperiment, workspace: Workspace, *, verify: bool) -> Iterator[ManyRuns]:
    """Open what the runs of `grid` share (see `open_runs`)."""
    titles = [stage_title(run.title, node) for run in grid.runs for node in run.nodes]
    workers = grid.config.workers
    with open_runs(grid.common, titles, workspace, workers=workers, verify=verify, tag="grid") as running:
        yield running


@task(name="grid", task_run_name="grid", retries=0, cache_policy=NO_CACHE, persist_result=False)
def conclude_grid(running: ManyRuns, grid: GridExperiment, outcomes: Mapping[str, RunOutcome]) -> GridFindings:
    """Write the page, the data and the artifacts; never cached, since it only reads finished results."""
    config = grid.config
    found = [
        (point, parted({seed: outcomes[folder_of(config.name, seed, point)] for seed in config.seeds}))
        for point in grid.points
    ]
    findings = GridFindings(config, tuple(PointResult(point, seeds, failed) for point, (seeds, failed) in found))
    write_atomic(running.folder / PAGE_FILE, html(grid_page(findings)))
    write_atomic(running.folder / DATA_FILE, grid_json(findings))
    artifacts = {
        f"accuracy-{decoding}": table_artifact(grid_table(findings, decoding), f"Accuracy in %, {decoding}")
        for decoding in findings.decodings
    }
    artifacts["costs"] = table_artifact(grid_costs(findings), "Costs of a seed, mean over seeds")
    artifacts["page"] = page_artifact(running.folder / PAGE_FILE, "Grid")
    offer_artifacts(config.name, "grid", artifacts, running.session.publisher)
    return findings

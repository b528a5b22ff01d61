"""`luffy watch [RUN ...]`: runs in progress, from any other terminal, until they end."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Annotated

from typer import Argument, Option

from luffy.cli.console import PLAIN_INTERVAL_S, live_lines, live_rows, say, terminal, text_table, wide_terminal
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.cli.run_watch import PlainLines, RunWatch
from luffy.cli.workspace_watch import OVERVIEW_HEADER, StageStatus, WorkspaceWatch, is_over
from luffy.errors import EXIT_FAILURE, EXIT_OK, DataError, UserError
from luffy.pipeline.workspace import Workspace, find_workspace
from luffy.pipeline.workspace.records import RunRecord, find_run, list_records

_POLL_S = 0.5


def watch(
    runs: Annotated[
        list[str] | None,
        Argument(help="names or directories of runs, or experiments' names", show_default="the newest in progress"),
    ] = None,
    every: Annotated[bool, Option("--all", help="one table of all runs in progress")] = False,
    metrics: Annotated[
        int | None, Option(min=1, max=65535, help="also serve Prometheus metrics at this port of 127.0.0.1")
    ] = None,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Follow a run in progress until it ends: stages, steps, newest figures, time left; or several, in one table."""
    where = find_workspace(workspace)
    if every and runs:
        raise UserError("--all: shows every run in progress; leave out the names, or --all")
    if every or len(runs or ()) > 1 or metrics is not None:
        return _watch_several(where, [find_run(where, run).name for run in runs or ()], metrics)
    record = find_run(where, runs[0]) if runs else _newest_live(where)
    watched = RunWatch(record.directory)
    say(f"{record.name} in {where.root}")
    with _display(watched) as show:
        while watched.look():
            show()
            time.sleep(_POLL_S)
        show()
    say(watched.verdict)
    return watched.exit_code


def _watch_several(workspace: Workspace, names: list[str], port: int | None) -> int:
    """One table until all runs have ended; exit code 1 unless all are finished."""
    several = WorkspaceWatch(workspace, names)
    statuses = several.look()
    if not statuses:
        raise DataError(f"workspace {workspace.root}: no run is under way (luffy runs lists them)")
    with ExitStack() as stack:
        if port is not None:
            from luffy.cli.metrics_page import served_metrics

            # A separate watch, since scrapes are served in another thread.
            stack.enter_context(served_metrics(WorkspaceWatch(workspace, names), port))
        show = stack.enter_context(_several_display(lambda: statuses))
        while not is_over(statuses):
            show()
            time.sleep(_POLL_S)
            statuses = several.look()
        show()
    conditions = {status.run: status.condition for status in statuses}
    for name, condition in conditions.items():
        say(f"{name}: {condition}")
    return EXIT_OK if set(conditions.values()) <= {"finished"} else EXIT_FAILURE


def _several_display(statuses: Callable[[], list[StageStatus]]) -> AbstractContextManager[Callable[[], None]]:
    if terminal().is_terminal:
        return live_rows(OVERVIEW_HEADER, lambda: [status.cells for status in statuses()])
    last = -PLAIN_INTERVAL_S

    def show() -> None:
        nonlocal last
        if time.monotonic() - last >= PLAIN_INTERVAL_S or is_over(statuses()):
            last = time.monotonic()
            wide_terminal().print(text_table(OVERVIEW_HEADER, [status.cells for status in statuses()]))

    return nullcontext(show)


def _display(watch: RunWatch) -> AbstractContextManager[Callable[[], None]]:
    if terminal().is_terminal:
        return live_lines(lambda: watch.lines)
    return nullcontext(PlainLines(watch).show)


def _newest_live(workspace: Workspace) -> RunRecord:
    live = [record for record in list_records(workspace) if record.is_live]
    arms = {arm for record in live for arm in record.arms.values()}
    for record in live:
        if record.directory not in arms:
            return record
    raise DataError(f"workspace {workspace.root}: no run is under way; name one (luffy runs lists them)")

"""`luffy watch [RUN]`: a run in progress, from any other terminal, until it ends."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

from typer import Argument

from luffy.cli.console import live_lines, say, terminal
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.cli.run_watch import PlainLines, RunWatch
from luffy.errors import DataError
from luffy.pipeline.workspace import Workspace, find_workspace
from luffy.pipeline.workspace.records import RunRecord, find_run, list_records

_POLL_S = 0.5


def watch(
    run: Annotated[
        str | None,
        Argument(help="a run's name or directory, or an experiment's name", show_default="the newest in progress"),
    ] = None,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Follow a run in progress until it ends: stages, steps, newest figures, time left."""
    where = find_workspace(workspace)
    record = find_run(where, run) if run else _newest_live(where)
    watched = RunWatch(record.directory)
    say(f"{record.name} in {where.root}")
    with _display(watched) as show:
        while watched.look():
            show()
            time.sleep(_POLL_S)
        show()
    say(watched.verdict)
    return watched.exit_code


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

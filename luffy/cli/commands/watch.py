"""`python -m luffy watch [RUN]`: a run that is under way, from any other terminal, until it ends."""

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from luffy.cli.console import live_lines, say, terminal
from luffy.cli.run_watch import PlainLines, RunWatch
from luffy.errors import DataError
from luffy.pipeline.records import RunRecord, find_run, list_records
from luffy.pipeline.workspace import Workspace, find_workspace

HELP = "a run under way: stages, step, newest figures, time left, until it ends"
_POLL_S = 0.5


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", help="a name, directory or experiment; default: the newest that is under way")


def run(options: argparse.Namespace) -> int:
    workspace = find_workspace(options.workspace)
    record = find_run(workspace, options.run) if options.run else _newest_live(workspace)
    watch = RunWatch(record.directory)
    say(f"{record.name} in {workspace.root}")
    with _display(watch) as show:
        while watch.look():
            show()
            time.sleep(_POLL_S)
        show()
    say(watch.verdict)
    return watch.exit_code


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
    raise DataError(f"workspace {workspace.root}: no run is under way; name one (python -m luffy runs lists them)")

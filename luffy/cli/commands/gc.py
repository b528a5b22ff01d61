"""`python -m luffy gc`: what of the workspace can go; with `--delete` it goes."""

import argparse
from collections.abc import Sequence
from typing import get_args

from luffy.cli.console import duration, say, size_words, text_table, wide_terminal
from luffy.errors import EXIT_FAILURE, EXIT_OK, DataError
from luffy.pipeline.disk import Extent, joined, measure
from luffy.pipeline.disposal import dispose
from luffy.pipeline.garbage import Garbage, Kind, survey
from luffy.pipeline.retention import Retention
from luffy.pipeline.workspace import Workspace, find_workspace

HELP = "what can go from the workspace, with sizes and reasons; --delete deletes it"
_HEADER = ("kind", "what", "size", "age", "why")
_DAY_S = 86400.0


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--delete", action="store_true", help="delete it; without this nothing is touched")
    parser.add_argument("--keep-runs", type=int, metavar="N", help="give up all but the newest N of each experiment")
    parser.add_argument("--older-than", type=float, metavar="DAYS", help="give up the runs that began before")
    parser.add_argument("--runs", nargs="+", default=[], metavar="NAME", help="give up these runs")
    parser.add_argument("--only", action="append", choices=get_args(Kind), help="only this kind; may be repeated")
    parser.add_argument(
        "--all-checkpoints",
        action="store_true",
        help="of finished stages all but the newest, whatever was asked to stay",
    )


def run(options: argparse.Namespace) -> int:
    workspace = find_workspace(options.workspace)
    if not workspace.root.is_dir():
        raise DataError(f"workspace {workspace.root}: no such folder; give another with --workspace")
    retention = _retention(options)
    found = survey(workspace, retention)
    garbage = [item for item in found.garbage if not options.only or item.kind in options.only]
    say(f"workspace {workspace.root}")
    for note in found.notes:
        say(f"left alone: {note}")
    extents = [measure(item.path) for item in garbage]
    if garbage:
        rows = [_row(workspace, item, extent) for item, extent in zip(garbage, extents, strict=True)]
        wide_terminal().print(text_table(_HEADER, rows))
    total = size_words(joined(extents).freed_bytes)
    if not options.delete:
        say(f"{total} can go; nothing was deleted: --delete does" if garbage else "nothing can go")
        return EXIT_OK
    return _delete(workspace, retention, garbage, total)


def _delete(workspace: Workspace, retention: Retention, garbage: Sequence[Garbage], total: str) -> int:
    done = dispose(workspace, retention, garbage)
    for item, reason in done.spared:
        say(f"still there: {item.path.relative_to(workspace.root)}: {reason}")
    freed = total if not done.spared else f"{len(done.gone)} of {len(garbage)}"
    say(f"deleted: {freed}" if garbage else "nothing can go")
    return EXIT_FAILURE if done.spared else EXIT_OK


def _retention(options: argparse.Namespace) -> Retention:
    for name, value in (("--keep-runs", options.keep_runs), ("--older-than", options.older_than)):
        if value is not None and value < 0:
            raise DataError(f"{name} {value}: must not be negative")
    days = options.older_than
    return Retention(
        options.keep_runs, None if days is None else days * _DAY_S, tuple(options.runs), options.all_checkpoints
    )


def _row(workspace: Workspace, item: Garbage, extent: Extent) -> tuple[str, ...]:
    what = str(item.path.relative_to(workspace.root))
    return item.kind, what, size_words(extent.num_bytes), duration(item.age_s), item.reason

"""`luffy gc`: what can be deleted from the workspace; with `--delete` it is."""

from typing import Annotated

from typer import Option

from luffy.cli.console import say, show_rows
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.errors import EXIT_FAILURE, EXIT_OK, DataError
from luffy.pipeline.disk import freed_bytes, measure
from luffy.pipeline.garbage import Retention, dispose, survey
from luffy.pipeline.workspace import find_workspace
from luffy.report.cells import size_words


def gc(
    delete: Annotated[bool, Option("--delete", help="delete; without this option nothing is deleted")] = False,
    keep_runs: Annotated[
        int | None, Option(min=0, metavar="N", help="keep only the newest N runs of each experiment")
    ] = None,
    runs: Annotated[list[str] | None, Option(metavar="NAME", help="delete this run; may be repeated")] = None,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """List what can be deleted from the workspace, with sizes and reasons; --delete deletes it."""
    where = find_workspace(workspace)
    if not where.root.is_dir():
        raise DataError(f"workspace {where.root}: no such folder; give another with --workspace")
    retention = Retention(keep_runs, tuple(runs or ()))
    found = survey(where, retention)
    garbage = found.garbage
    say(f"workspace {where.root}")
    for note in found.notes:
        say(f"left alone: {note}")
    if garbage:
        rows = [(str(it.path.relative_to(where.root)), size_words(measure(it.path)), it.reason) for it in garbage]
        show_rows(("what", "size", "why"), rows)
    total = size_words(freed_bytes(*(item.path for item in garbage)))
    if not delete:
        say(f"{total} can be deleted; add --delete to delete it" if garbage else "nothing can be deleted")
        return EXIT_OK
    spared = dispose(where, retention, garbage)
    for item, reason in spared:
        say(f"still there: {item.path.relative_to(where.root)}: {reason}")
    freed = total if not spared else f"{len(garbage) - len(spared)} of {len(garbage)}"
    say(f"deleted: {freed}" if garbage else "nothing can be deleted")
    return EXIT_FAILURE if spared else EXIT_OK

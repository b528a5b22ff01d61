"""`luffy diff FIRST SECOND`: two runs, or two evaluations, beside each other."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from luffy.cli import run_diff
from luffy.cli.accuracies import RESULTS_FILE, by_suite
from luffy.cli.console import say, shown_of, terminal, text_table, wide_terminal
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.cli.run_view import accuracies
from luffy.cli.settings_view import changed_settings
from luffy.errors import EXIT_OK, DataError
from luffy.pipeline.workspace import Workspace, find_workspace
from luffy.pipeline.workspace.records import RunRecord, find_run


def diff(
    first: Annotated[str, Argument(help="a run (name or directory), or the directory of a finished evaluation")],
    second: Annotated[str, Argument(help="another one of the same kind; evaluations must share suites")],
    show: Annotated[int, Option(min=0, metavar="N", help="list N changed problems at most")] = 20,
    everything: Annotated[bool, Option("--all", help="list every metric of two runs")] = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Compare two runs (configuration, stages, metrics, accuracies) or two evaluations (the problems that changed)."""
    where = find_workspace(workspace)
    one, other = (_find(where, text) for text in (first, second))
    if isinstance(one, RunRecord) and isinstance(other, RunRecord):
        return show_runs(one, other, everything=everything)
    if isinstance(one, Path) and isinstance(other, Path):
        return show_evaluations(one, other, show)
    raise DataError(f"{first} and {second}: one is a run, the other an evaluation; give two of a kind")


def show_runs(first: RunRecord, second: RunRecord, *, everything: bool) -> int:
    """Print how the second of two runs differs from the first."""
    console = wide_terminal()
    say(f"first {first.name} ({first.condition}), second {second.name} ({second.condition})")
    fields = changed_settings(first.config, second.config)
    if fields:
        console.print(text_table(["field", "first", "second"], fields, title="\nConfiguration"))
    else:
        say("the same configuration")
    console.print(text_table(run_diff.STAGE_HEADER, run_diff.stage_rows(first, second), title="\nStages"))
    rows = run_diff.metric_rows(first, second, everything=everything)
    if rows:
        console.print(text_table(run_diff.METRIC_HEADER, rows, title="\nNewest metrics"))
    _show_accuracies(first, second)
    return EXIT_OK


def _find(workspace: Workspace, text: str) -> RunRecord | Path:
    """A run, else a directory; the reader of evaluations reports a directory without one."""
    path = Path(text).expanduser()
    if (path / RESULTS_FILE).is_file():
        return path
    try:
        return find_run(workspace, text)
    except DataError:
        if path.is_dir():
            return path
        raise


def _show_accuracies(first: RunRecord, second: RunRecord) -> None:
    console = wide_terminal()
    for record in (first, second):
        if found := accuracies(record):
            header, rows = by_suite(found)
            console.print(text_table(header, rows, title=f"\nAccuracy in % with its interval, {record.name}"))
    pairs = run_diff.compared_evaluations(first, second)
    if not pairs:
        return
    from luffy.cli import evaluations  # numpy: only when it is needed

    rows = [
        [node, *row]
        for node, one, other in pairs
        for row in evaluations.comparison_rows(evaluations.diff(one.directory, other.directory))
    ]
    title = "\nSecond minus first in percentage points, paired over problems"
    console.print(text_table(("stage", *evaluations.COMPARISON_HEADER), rows, title=title))


def show_evaluations(first: Path, second: Path, limit: int) -> int:
    """Print how the second of two evaluations compares with the first, and the problems whose result changed."""
    from luffy.cli import evaluations  # numpy and pyarrow: only when they are needed

    changes = evaluations.diff(first, second)
    console = terminal()
    say(f"{second} minus {first}, in percentage points")
    console.print(text_table(evaluations.COMPARISON_HEADER, evaluations.comparison_rows(changes)))
    for suite, decoding in changes.left_out:
        say(f"{suite}, {decoding}: only in one of the two")
    for part in changes.cells:
        rows = evaluations.problem_rows(part, limit)
        say(f"\n{', '.join(part.cell)}: {shown_of(len(part.changed), limit)} changed")
        if rows:
            console.print(text_table(evaluations.PROBLEM_HEADER, rows))
        for remark in evaluations.remarks(part):
            say(remark)
    return EXIT_OK

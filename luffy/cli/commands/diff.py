"""`python -m luffy diff FIRST SECOND`: two runs, or two evaluations, beside each other."""

import argparse
from pathlib import Path

from luffy.cli import run_diff
from luffy.cli.console import say, shown_of, terminal, text_table, wide_terminal
from luffy.cli.results import RESULTS_FILE, by_suite
from luffy.cli.run_view import accuracies
from luffy.cli.settings_view import changed_settings
from luffy.errors import EXIT_OK, DataError
from luffy.pipeline.records import RunRecord, find_run
from luffy.pipeline.workspace import Workspace, find_workspace

HELP = "two runs: configuration, stages, metrics, accuracies; or two evaluations: the problems that changed"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="a run (name or directory), or the directory of a finished evaluation")
    parser.add_argument("second", help="another one; evaluations must share suites")
    parser.add_argument("--show", type=int, default=20, metavar="N", help="of evaluations list N changes at most (20)")
    parser.add_argument("--all", action="store_true", help="of runs list every metric")


def run(options: argparse.Namespace) -> int:
    workspace = find_workspace(options.workspace)
    first, second = (_find(workspace, text) for text in (options.first, options.second))
    if isinstance(first, RunRecord) and isinstance(second, RunRecord):
        return show_runs(first, second, everything=options.all)
    if isinstance(first, Path) and isinstance(second, Path):
        return show_evaluations(first, second, options.show)
    raise DataError(f"{options.first} and {options.second}: one is a run, the other an evaluation; give two of a kind")


def show_runs(first: RunRecord, second: RunRecord, *, everything: bool) -> int:
    """Print in what the second of two runs differs from the first."""
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
    """A run, or else the directory of an evaluation, which need not be one: its reader says what is wrong with it."""
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
        say(f"{suite}, {decoding}: in one of the two alone")
    for part in changes.cells:
        rows = evaluations.problem_rows(part, limit)
        say(f"\n{', '.join(part.cell)}: {shown_of(len(part.changed), limit)} changed")
        if rows:
            console.print(text_table(evaluations.PROBLEM_HEADER, rows))
        for remark in evaluations.remarks(part):
            say(remark)
    return EXIT_OK

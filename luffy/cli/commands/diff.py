"""`python -m luffy diff FIRST SECOND`: two evaluations beside each other."""

import argparse
from pathlib import Path

from luffy.cli.console import say, shown_of, terminal, text_table
from luffy.errors import EXIT_OK

HELP = "two evaluations, and the problems that changed"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="a finished evaluation")
    parser.add_argument("second", help="another one, with the same suites")
    parser.add_argument("--show", type=int, default=20, metavar="N", help="list N changes at most (20)")


def run(options: argparse.Namespace) -> int:
    return show_evaluations(Path(options.first), Path(options.second), options.show)


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

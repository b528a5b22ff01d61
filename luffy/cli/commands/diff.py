"""`luffy diff FIRST SECOND`: two evaluations beside each other."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from luffy.cli.console import say, shown_of, terminal, text_table
from luffy.cli.options import Debug
from luffy.errors import EXIT_OK


def diff(
    first: Annotated[Path, Argument(help="directory of a finished evaluation, e.g. runs/mine-1/stages/evaluate_rl")],
    second: Annotated[Path, Argument(help="another one; they must share suites")],
    show: Annotated[int, Option(min=0, metavar="N", help="list N changed problems at most")] = 20,
    debug: Debug = False,
) -> int:
    """Compare two evaluations: the paired difference of each suite, and the problems whose result changed."""
    from luffy.cli import evaluations  # numpy and pyarrow: only when they are needed

    changes = evaluations.diff(first, second)
    console = terminal()
    say(f"{second} minus {first}, in percentage points")
    console.print(text_table(evaluations.COMPARISON_HEADER, evaluations.comparison_rows(changes)))
    for suite, decoding in changes.left_out:
        say(f"{suite}, {decoding}: only in one of the two")
    for part in changes.cells:
        rows = evaluations.problem_rows(part, show)
        say(f"\n{', '.join(part.cell)}: {shown_of(len(part.changed), show)} changed")
        if rows:
            console.print(text_table(evaluations.PROBLEM_HEADER, rows))
        for remark in evaluations.remarks(part):
            say(remark)
    return EXIT_OK

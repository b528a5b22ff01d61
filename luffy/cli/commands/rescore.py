"""`luffy rescore EVALUATION --grader KIND`: responses graded again; `luffy diff FIRST SECOND`: two evaluations."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from luffy.cli.options import Debug
from luffy.errors import EXIT_OK


def rescore(
    stage: Annotated[
        Path, Argument(metavar="EVALUATION", help="a finished evaluation: workspace/runs/RUN/stages/evaluate_rl")
    ],
    grader: Annotated[str, Option(help="math, math_strict, choice, exact, or a kind with its settings in YAML")],
    out: Annotated[
        Path | None, Option(metavar="DIR", help="folder to write to [rescored/GRADER below the evaluation]")
    ] = None,
    suite: Annotated[list[str] | None, Option(metavar="NAME", help="only this suite; may be repeated")] = None,
    show: Annotated[int, Option(min=0, metavar="N", help="list N changes at most")] = 20,
    debug: Debug = False,
) -> int:
    """Grade an evaluation's responses again by another grader."""
    from luffy.cli import evaluations  # numpy and pyarrow: only when they are needed

    evaluations.rescore(stage, grader, out, suite or [], show)
    return EXIT_OK


def diff(
    first: Annotated[Path, Argument(help="directory of a finished evaluation, e.g. runs/mine-1/stages/evaluate_rl")],
    second: Annotated[Path, Argument(help="another one; they must share suites")],
    show: Annotated[int, Option(min=0, metavar="N", help="list N changed problems at most")] = 20,
    debug: Debug = False,
) -> int:
    """Compare two evaluations: the paired difference of each suite, and the problems whose result changed."""
    from luffy.cli import evaluations  # numpy and pyarrow: only when they are needed

    evaluations.diff(first, second, show)
    return EXIT_OK

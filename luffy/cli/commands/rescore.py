"""`luffy rescore EVALUATION --grader KIND`: saved responses graded again, and what that changes."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from luffy.cli.console import say, shown_of, terminal, text_table
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

    done = evaluations.rescore(stage, grader, out, suite or [])
    console = terminal()
    say(f"graded again by {grader}")
    console.print(text_table(evaluations.SCORE_HEADER, done.scores))
    if done.changed:
        say(f"\n{shown_of(len(done.changed), show)} responses with another verdict")
        console.print(text_table(evaluations.CHANGED_HEADER, done.changed[:show]))
    for note in done.notes:
        say(note)
    say(f"written to {done.folder}")
    return EXIT_OK

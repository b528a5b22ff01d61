"""`python -m luffy rescore EVALUATION --grader KIND`: saved responses graded again, and what that changes."""

import argparse
from pathlib import Path

from luffy.cli.console import say, shown_of, terminal, text_table
from luffy.errors import EXIT_OK

HELP = "grade an evaluation's responses by another grader"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", help="a finished evaluation, e.g. workspace/runs/arithmetic-1/stages/evaluate_rl")
    parser.add_argument("--grader", required=True, help="math, math_strict, choice, exact, or a kind in YAML")
    parser.add_argument("--out", help="folder to write to; default: rescored/GRADER below the evaluation")
    parser.add_argument("--suite", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--show", type=int, default=20, metavar="N", help="list N changes at most (20)")


def run(options: argparse.Namespace) -> int:
    from luffy.cli import evaluations  # numpy and pyarrow: only when they are needed

    out, limit = None if options.out is None else Path(options.out), options.show
    done = evaluations.rescore(Path(options.stage), options.grader, out, options.suite)
    console = terminal()
    say(f"graded again by {options.grader}")
    console.print(text_table(evaluations.SCORE_HEADER, done.scores))
    if done.changed:
        say(f"\n{shown_of(len(done.changed), limit)} responses with another verdict")
        console.print(text_table(evaluations.CHANGED_HEADER, done.changed[:limit]))
    for note in done.notes:
        say(note)
    say(f"written to {done.folder}")
    return EXIT_OK

"""`python -m luffy`: looking at what is there and what would be done. Starts nothing, needs no Prefect; torch for
`export --step` alone.

python -m luffy plan exp_configs/arithmetic.yaml [key.path=value ...]
python -m luffy runs
python -m luffy show arithmetic [--plots] [--samples 5 --reward 0..0.5]
python -m luffy watch [arithmetic-1]
python -m luffy diff arithmetic-1 arithmetic-2
python -m luffy gc [--keep-runs 3] [--delete]
python -m luffy export workspace/runs/arithmetic-1/stages/rl FOLDER [--step 40]
python -m luffy leaderboard [workspace]
python -m luffy rescore workspace/runs/arithmetic-1/stages/evaluate_rl --grader math_strict
python -m luffy diff workspace/runs/arithmetic-1/stages/evaluate_sft workspace/runs/arithmetic-1/stages/evaluate_rl
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from luffy.cli.commands import diff, export, gc, leaderboard, plan, rescore, runs, show, watch
from luffy.cli.console import show_error
from luffy.errors import EXIT_INTERRUPTED, LuffyError


class Command(Protocol):
    """What a module in `luffy/cli/commands/` has."""

    HELP: str
    """One line."""

    def add(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own arguments."""
        ...

    def run(self, options: argparse.Namespace) -> int:
        """Do it; returns the exit code, raises LuffyError."""
        ...


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "plan": plan,
        "runs": runs,
        "show": show,
        "watch": watch,
        "diff": diff,
        "leaderboard": leaderboard,
        "rescore": rescore,
        "export": export,
        "gc": gc,
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parse_with_overrides(_parser(), arguments)
    try:
        return COMMANDS[options.command].run(options)
    except LuffyError as error:
        if options.debug:
            raise
        show_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parse_with_overrides(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, but `key.path=value` may also stand after options, which argparse alone refuses."""
    options, left = parser.parse_known_args(arguments)
    unknown = [text for text in left if text.startswith("-") or "=" not in text or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if left:
        options.overrides = [*options.overrides, *left]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m luffy", description="Look at experiments and take models out of them; runs nothing."
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--workspace", help="default: $LUFFY_WORKSPACE, else ./workspace")
    shared.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        command.add(commands.add_parser(name, parents=[shared], help=command.HELP, description=f"{command.HELP}."))
    return parser


if __name__ == "__main__":
    sys.exit(main())

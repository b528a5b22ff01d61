"""The command line: `luffy COMMAND ...`, the same as `python -m luffy COMMAND ...`.

Help and plans load neither torch nor Prefect.
"""

import errno
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from typer import Abort, Typer, TyperException

from luffy.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER_ERROR, LuffyError
from luffy.library_loading import without_collections
from luffy.processes import exit_without_finalizing

with without_collections():
    from luffy.cli.console import show_error
    from luffy.cli.options import fields_help

_NAME = "luffy"
_SHOWN = 80
"""Characters of a name that is too long for the file system."""
_GROUPS = {
    "Experiments": ("run", "plan", "config", "evaluate", "compare", "serve"),
    "Results": ("show", "diff", "rescore", "export", "gc"),
}
_MODULES = {"plan": "run", "diff": "rescore"}
"""Where a command is, in a module of another's name."""
_TAKE_FIELDS = ("run", "plan", "config", "evaluate")
_GONE = {
    "bench": "luffy run CONFIG rl.steps=5 measures a few real steps, and luffy plan shows what they took",
    "watch": "Prefect's UI lists the runs, luffy show RUN their state",
    "doctor": "luffy run smoke tries this machine, luffy plan CONFIG and pip check look for what is wrong",
    "eval": "luffy evaluate CONFIG --model MODEL plays an experiment's environment with any model",
    "explain": "luffy config CONFIG --explain prints what it printed",
    "export-environment": "nothing takes its place",
    "export-traces": "luffy export RUN FILE.parquet writes the traces of a run",
    "grid": "luffy compare runs grids, too",
    "leaderboard": "luffy show --leaderboard prints and writes it",
    "prepare": "luffy run CONFIG --only prepare_data makes the data alone",
    "runs": "luffy show lists the runs and results of a workspace",
    "study": "luffy compare runs studies, too, with --cells, --collect and --page; --dry-run has its plan",
    "serve-engine": "cluster: ray has engines on other machines; luffy evaluate --model api:NAME asks a server",
}
_EPILOG = """\
luffy COMMAND --help shows the options of a command; luffy config --fields lists every field of an experiment.

Exit codes: 0 done, 1 failure, 2 mistake in the command, the configuration or the data, 75 ended by SIGTERM,
130 interrupted by Ctrl-C. After 75 and 130, repeat the command to continue.
"""


def application(first: str = "") -> Typer:
    """The command line: of the command `first` alone, so that no other one's libraries load, else of all."""
    app = Typer(
        name=_NAME,
        help="Off-policy-guided RL of language models as cached, restartable stages.",
        epilog=_EPILOG,
        callback=lambda: None,  # without one, the name of a single command would be no part of the line
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    known = {name: group for group, names in _GROUPS.items() for name in names}
    for name in (first,) if first in known else known:
        with without_collections():
            command = getattr(import_module(f"luffy.cli.commands.{_MODULES.get(name, name)}"), name)
        epilog = fields_help() if name in _TAKE_FIELDS else None
        app.command(rich_help_panel=known[name], epilog=epilog)(command)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if arguments[0] in _GONE:
        show_error(f"luffy {arguments[0]} is gone; {_GONE[arguments[0]]}")
        return EXIT_USER_ERROR
    try:
        return application(arguments[0])(arguments, prog_name=_NAME, standalone_mode=False) or 0
    except LuffyError as error:
        if "--debug" in arguments:
            raise
        show_error(str(error))
        return error.exit_code
    except OSError as error:
        from luffy.pipeline.disk import lack_of_space  # late, to start fast

        if "--debug" in arguments:
            raise
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # whatever name or path the command was given
            show_error(f"{str(error.filename)[:_SHOWN]}: {error.strerror}")
        elif (lack := lack_of_space(error)) is not None:
            remedy = "free space (luffy gc lists what to delete), or give another folder with --workspace"
            show_error(f"{error.filename or 'workspace'}: {lack}; {remedy}")
        else:
            raise
        return EXIT_USER_ERROR
    except TyperException as error:
        context = getattr(error, "ctx", None)  # of the command, once that is known
        where = context.command_path if context is not None else _NAME
        show_error(" ".join(f"{error.format_message()} ({where} --help)".split()))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Abort:
        return EXIT_FAILURE


def script(command: str | None = None) -> NoReturn:
    """Run the command line of this process, as arguments of `command` where one is given, and exit.

    As stages do: a thread of a library's that still runs may end an interpreter that finalizes by SIGSEGV.
    """
    exit_without_finalizing(main([command, *sys.argv[1:]] if command else None))


if __name__ == "__main__":
    script()

"""`luffy config CONFIG`: the resolved configuration with each value's origin, or what it minimises."""

from typing import Annotated

from typer import Argument, Option

from luffy.cli.config_view import explain_experiment, resolved_lines
from luffy.cli.console import say, text_table, wide_terminal
from luffy.cli.options import Debug, Overrides, complete_config
from luffy.config.fields import all_fields
from luffy.config.load import resolve_experiment
from luffy.errors import EXIT_OK, ConfigError

_FIELD_HEADER = ("field", "type", "default", "meaning")


def config(
    config: Annotated[
        str | None,
        Argument(
            metavar="CONFIG",
            help="YAML file of an experiment, or the name of a shipped one; with --fields a section such as rl",
            autocompletion=complete_config,
            show_default=False,
        ),
    ] = None,
    overrides: Overrides = None,
    given: Annotated[bool, Option("--given", help="leave out fields at their defaults")] = False,
    fields: Annotated[
        bool, Option("--fields", help="list the fields of an experiment, or of the section given, with their meaning")
    ] = False,
    explain: Annotated[
        bool, Option("--explain", help="instead: what SFT and RL minimise, in words and symbols; also of a stage's job")
    ] = False,
    stage: Annotated[str | None, Option(metavar="STAGE", help="with --explain: sft or rl only")] = None,
    debug: Debug = False,
) -> int:
    """Print an experiment with every value resolved, and where each value comes from.

    The output is a YAML file of the same experiment.
    """
    if stage is not None and not explain:
        raise ConfigError("--stage: chooses what --explain shows; give --explain, too")
    if fields:
        return _show_fields(config or "")
    if config is None:
        raise ConfigError("CONFIG: missing; give an experiment, or --fields")
    if explain:
        for title, text in explain_experiment(config, overrides or (), stage):
            say(f"{title}\n\n{text}\n")
        return EXIT_OK
    for line in resolved_lines(resolve_experiment(config, overrides or ()), defaults=not given):
        say(line)
    return EXIT_OK


def _show_fields(section: str) -> int:
    found = all_fields(section)
    if not found:
        raise ConfigError(f"{section}: no such field; luffy config --fields lists all")
    rows = [(field.path, field.type, field.default or "", field.description) for field in found]
    wide_terminal().print(text_table(_FIELD_HEADER, rows))
    return EXIT_OK

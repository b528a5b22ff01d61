"""`luffy explain CONFIG`: what the training stages of an experiment minimise, in words and symbols."""

from typing import Annotated

from typer import Option

from luffy.cli.console import say
from luffy.cli.objective_view import explain_experiment
from luffy.cli.options import Config, Debug, Overrides
from luffy.errors import EXIT_OK


def explain(
    config: Config,
    overrides: Overrides = None,
    stage: Annotated[str | None, Option(metavar="STAGE", help="sft or rl only [all in the chain]")] = None,
    debug: Debug = False,
) -> int:
    """What SFT and RL minimise, in words and symbols; also of a stage's own config.yaml."""
    for title, text in explain_experiment(config, overrides or (), stage):
        say(f"{title}\n\n{text}\n")
    return EXIT_OK

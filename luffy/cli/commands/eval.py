"""`luffy eval ENVIRONMENT --model MODEL`: a quick look at a model in an environment, without an experiment."""

from typing import Annotated

from pydantic import JsonValue
from typer import Argument, BadParameter, Option
from yaml import YAMLError

from luffy.cli.options import Debug
from luffy.config.environment_look import EnvironmentLook, look_config
from luffy.config.yaml_source import parse_scalar
from luffy.errors import EXIT_OK


def eval(  # noqa: A001 - the command's name, as `vf-eval`
    environment: Annotated[
        str,
        Argument(
            metavar="ENVIRONMENT",
            help="guess_number, five_letters, calculator or python; a YAML file with a section `environment` (and "
            "perhaps `data.suites`, `grading`); or the id of an environment of the package verifiers",
            show_default=False,
        ),
    ],
    model: Annotated[str, Option(metavar="MODEL", help="a Hugging Face folder, a hub id, or api:NAME served at --url")],
    num_problems: Annotated[int, Option("--num-problems", "-n", min=1, help="problems of each suite")] = 20,
    num_samples: Annotated[int, Option("--num-samples", "-r", min=1, help="episodes of each problem")] = 1,
    temperature: Annotated[float, Option(min=0.0, help="0 is greedy")] = 1.0,
    max_tokens: Annotated[int, Option(min=1, help="limit of tokens in all turns of an episode")] = 2048,
    show: Annotated[int, Option(min=0, help="number of episodes to print in full")] = 3,
    chat_template: Annotated[
        str | None, Option(metavar="NAME", help="chat template: a shipped name or a Jinja file [the model's]")
    ] = None,
    url: Annotated[
        list[str] | None, Option(metavar="URL", help="server of api:NAME with OpenAI's protocol; may be repeated")
    ] = None,
    python: Annotated[
        str | None, Option(metavar="FILE", help="Python interpreter with verifiers and the environment installed")
    ] = None,
    argument: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="argument of its load_environment; may be repeated")
    ] = None,
    debug: Debug = False,
) -> int:
    """Play a few episodes and print accuracy, measures and transcripts.

    Nothing is kept: for results with intervals, tables and restarts write an experiment.
    """
    look = EnvironmentLook(
        target=environment,
        model=model,
        num_problems=num_problems,
        num_samples=num_samples,
        temperature=temperature,
        max_response_tokens=max_tokens,
        chat_template=chat_template,
        urls=tuple(url or ()),
        python=python,
        arguments=dict(_argument(text) for text in argument or ()),
    )
    config = look_config(look)
    from luffy.cli.environment_view import show_records  # late, with the next: they load torch
    from luffy.stages.quick_look import play

    show_records(play(config, num_problems), show)
    return EXIT_OK


def _argument(text: str) -> tuple[str, JsonValue]:
    """`max_turns=3`, the value in YAML."""
    name, separator, value = text.partition("=")
    try:
        if name and separator:
            return name, parse_scalar(value)
    except YAMLError:
        pass
    raise BadParameter(f"{text!r} is not of the form name=value with a value in YAML", param_hint="--argument")

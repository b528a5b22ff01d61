"""`luffy evaluate CONFIG`: one model, or the kept checkpoints of an RL run, by an experiment's suites and protocol."""

from typing import Annotated

from pydantic import JsonValue
from typer import BadParameter, Option
from yaml import YAMLError

from luffy.cli.options import Config, Debug, DryRun, Overrides, Verify, WorkspaceFolder
from luffy.cli.start import StartOptions, start_experiment
from luffy.config import load_experiment
from luffy.config.derived import EvaluatedModel, evaluated
from luffy.config.yaml_source import parse_scalar
from luffy.pipeline.experiment import check_checkpoints
from luffy.pipeline.workspace import find_workspace

_FLOW = "luffy.flows.evaluate_checkpoint:evaluate_checkpoint"


def evaluate(
    config: Config,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        Option(
            metavar="MODEL", help="a Hugging Face folder, a stage's directory, a hub id, or api:NAME served at --url"
        ),
    ] = None,
    steps: Annotated[
        str | None, Option(metavar="N,N,...", help="RL steps of the experiment's own run whose checkpoints were kept")
    ] = None,
    chat_template: Annotated[
        str | None,
        Option(metavar="NAME", help="chat template: a shipped name or a Jinja file [the model's]"),
    ] = None,
    url: Annotated[
        list[str] | None,
        Option(metavar="URL", help="server of api:NAME with OpenAI's protocol; repeat it for more servers"),
    ] = None,
    request: Annotated[
        list[str] | None,
        Option(metavar="FIELD=VALUE", help="further field of each request to api:NAME, e.g. reasoning_effort=low"),
    ] = None,
    dry_run: DryRun = False,
    verify: Verify = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Evaluate a model, or checkpoints of an RL run.

    Give one of --model and --steps. The key for --url comes from the environment variable that
    execution.server.api_key_variable names (OPENAI_API_KEY).
    """
    wanted = EvaluatedModel(
        model=model,
        steps=_steps(steps),
        chat_template=chat_template,
        urls=tuple(url or ()),
        request=dict(_field(text) for text in request or ()),
    )
    experiment = evaluated(load_experiment(config, overrides or ()), wanted)
    options = StartOptions(find_workspace(workspace), dry_run, verify, debug)
    if not dry_run:
        check_checkpoints(experiment, wanted.steps, options.workspace)
    parameters = {"config_file": config, "overrides": overrides or [], **wanted.given()}
    return start_experiment(_FLOW, experiment, parameters, options, sweep_steps=wanted.steps)


def _steps(text: str | None) -> tuple[int, ...]:
    """`100,200,300`, in ascending order."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")})) if text is not None else ()
    except ValueError:
        raise BadParameter(f"{text!r} is not of the form 100,200,300", param_hint="--steps") from None


def _field(text: str) -> tuple[str, JsonValue]:
    """`reasoning_effort=low`, the value in YAML."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise BadParameter(f"{text!r} is not of the form field=value", param_hint="--request")
    try:
        return name, parse_scalar(value)
    except YAMLError:
        raise BadParameter(f"{text!r}: the value is not valid YAML", param_hint="--request") from None

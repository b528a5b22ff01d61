"""`luffy run`, `luffy plan` and `luffy evaluate`: one experiment, its plan, or its models."""

from functools import partial
from typing import Annotated

from pydantic import JsonValue
from typer import BadParameter, Option
from yaml import YAMLError

from luffy.cli.options import (
    CONFIG_HELP,
    Config,
    Debug,
    DryRun,
    Overrides,
    Verify,
    WorkspaceFolder,
    config_argument,
)
from luffy.cli.planning import check, plans_of, show_plan, show_sweep_plan
from luffy.config import load_experiment
from luffy.config.derived import EvaluatedModel, evaluation
from luffy.config.many_runs.sweep_runs import kind_of_file, load_sweep
from luffy.config.yaml_source import parse_scalar
from luffy.errors import EXIT_OK, ConfigError
from luffy.flows.launch import launch
from luffy.pipeline.experiment import check_checkpoints
from luffy.pipeline.graph import build_graph, select_nodes
from luffy.pipeline.workspace import find_workspace

Only = Annotated[
    list[str] | None,
    Option(metavar="STAGE", help="make this stage alone; those that it is made from have to be finished (repeatable)"),
]
Force = Annotated[
    list[str] | None,
    Option(metavar="STAGE", help="make this stage again from the beginning although it is finished (repeatable)"),
]
Adopt = Annotated[
    bool, Option("--adopt", help="take over results that other code has made, where nothing else differs; it is noted")
]


def run(
    config: Config,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    verify: Verify = False,
    only: Only = None,
    force: Force = None,
    adopt: Adopt = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Run an experiment from its data to its report.

    Finished stages are reused and an interrupted one resumes: repeat the command to continue.
    """
    where, experiment = find_workspace(workspace), load_experiment(config, overrides or ())
    nodes = build_graph(experiment)
    select_nodes(nodes, force or (), "--force")
    chosen = select_nodes(nodes, only or (), "--only")
    if dry_run:
        show_plan(experiment, where, verify=verify, only=chosen, adopts=adopt)
        return EXIT_OK
    check([experiment], where, nodes=[node for node in nodes if node.name in chosen] or None)
    parameters = {"config_file": config, "overrides": overrides or [], "verify": verify}
    parameters |= {"only": only, "force": force, "adopt": adopt}
    plans = partial(plans_of, experiment, where, verify=verify)
    return launch("luffy.flows.full_pipeline:full_pipeline", parameters, where, plans, debug=debug)


def plan(
    config: Config,
    overrides: Overrides = None,
    verify: Verify = False,
    adopt: Adopt = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """What a run would do with each stage, and why; also of a comparison, a grid or a study."""
    where = find_workspace(workspace)
    if kind_of_file(config) != "experiment":
        if adopt:
            raise BadParameter("a comparison adopts nothing; plan one of its runs", param_hint="--adopt")
        sweep = load_sweep(config, overrides or ())
        show_sweep_plan(sweep, where, sweep.selected(()), verify=verify)
    else:
        show_plan(load_experiment(config, overrides or ()), where, verify=verify, adopts=adopt)
    return EXIT_OK


def evaluate(
    config: Annotated[
        str | None, config_argument(f"{CONFIG_HELP}; --model with --suite, and --responses, need none")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        Option(
            metavar="MODEL",
            help="a Hugging Face folder, a stage's directory, a hub id, or api:NAME served at --url; with --responses "
            "a name to show",
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        Option(
            metavar="[NAME=]SUITE",
            help="problems, in place of the experiment's: a .parquet, .jsonl or .csv file, a benchmark by name "
            "(aime24), an environment (guess_number, verifiers:ID, reasoning_gym:TASK), or a source in YAML; may be "
            "repeated",
        ),
    ] = None,
    steps: Annotated[
        str | None, Option(metavar="N,N,...", help="RL steps of the experiment's own run whose checkpoints were kept")
    ] = None,
    chat_template: Annotated[
        str | None, Option(metavar="NAME", help="chat template: a shipped name or a Jinja file [the model's]")
    ] = None,
    url: Annotated[
        list[str] | None,
        Option(metavar="URL", help="server of api:NAME with OpenAI's protocol; repeat it for more servers"),
    ] = None,
    request: Annotated[
        list[str] | None,
        Option(metavar="FIELD=VALUE", help="further field of each request to api:NAME, e.g. reasoning_effort=low"),
    ] = None,
    responses: Annotated[
        list[str] | None,
        Option(
            metavar="FILE",
            help="grade what another system sampled: .parquet or .jsonl of verl or LUFFY, or with the columns problem, "
            "answer and response; may be repeated, and hold *",
        ),
    ] = None,
    dry_run: DryRun = False,
    verify: Verify = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Evaluate a model, checkpoints of an RL run, or responses made elsewhere.

    Give one of --model, --steps and --responses, which are graded as CONFIG says, without it by the grader math.
    Without CONFIG a model answers --suite greedily, in up to 2,048 tokens or half of its context. The key for --url
    comes from the environment variable that execution.server.api_key_variable names (OPENAI_API_KEY).
    """
    if responses:
        others = {"--steps": steps, "--suite": suite, "--url": url, "--dry-run": dry_run}
        if extra := [name for name, value in others.items() if value]:
            raise ConfigError(f"{extra[0]} has no effect with --responses; remove it")
        from luffy.cli.evaluations import evaluate_responses  # numpy and pyarrow: only when they are needed

        experiment = None if config is None else load_experiment(config, overrides or ())
        evaluate_responses(find_workspace(workspace), responses, experiment, model)
        return EXIT_OK
    if config is not None and "=" in config and model is not None and suite:  # the first override
        overrides, config = [config, *(overrides or ())], None
    try:
        at = tuple(sorted({int(part) for part in steps.split(",")})) if steps is not None else ()
    except ValueError:
        raise BadParameter(f"{steps!r} is not of the form 100,200,300", param_hint="--steps") from None
    wanted = EvaluatedModel(
        model=model,
        steps=at,
        chat_template=chat_template,
        urls=tuple(url or ()),
        request=dict(_request_field(text) for text in request or ()),
        suites=tuple(suite or ()),
    )
    where, experiment = find_workspace(workspace), evaluation(config, overrides or (), wanted)
    if dry_run:
        show_plan(experiment, where, verify=verify, sweep_steps=at)
        return EXIT_OK
    check_checkpoints(experiment, at, where)
    check([experiment], where, sweep_steps=at)
    parameters = {"config_file": config, "overrides": overrides or [], **wanted.given(), "verify": verify}
    plans = partial(plans_of, experiment, where, verify=verify, sweep_steps=at)
    return launch("luffy.flows.evaluate_checkpoint:evaluate_checkpoint", parameters, where, plans, debug=debug)


def _request_field(text: str) -> tuple[str, JsonValue]:
    """`reasoning_effort=low`, the value in YAML."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise BadParameter(f"{text!r} is not of the form field=value", param_hint="--request")
    try:
        return name, parse_scalar(value)
    except YAMLError:
        raise BadParameter(f"{text!r}: the value is not valid YAML", param_hint="--request") from None

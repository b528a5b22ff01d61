"""`luffy evaluate`: a model, checkpoints of an RL run, or responses that another system sampled."""

import hashlib
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import JsonValue
from typer import BadParameter, Option
from yaml import YAMLError

from luffy.cli.console import say
from luffy.cli.options import CONFIG_HELP, Debug, DryRun, Overrides, Verify, WorkspaceFolder, config_argument
from luffy.cli.planning import check, show_plan
from luffy.cli.run_view import show_results
from luffy.config import STAGE_KINDS, ExperimentConfig, load_experiment
from luffy.config.derived import EvaluatedModel, evaluation
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import ExecutionConfig
from luffy.config.grading import GradingConfig
from luffy.config.shipped import expand_pattern
from luffy.config.strict import run_name
from luffy.config.yaml_source import parse_scalar
from luffy.errors import EXIT_OK, ConfigError
from luffy.evaluation.regrading import DECODING, read_responses, write_responses
from luffy.evaluation.results import RESULTS_FILE
from luffy.evaluation.sample_files import SAMPLES_FILE
from luffy.flows.launch import launch
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.pipeline.experiment import check_checkpoints, open_experiment
from luffy.pipeline.identity import KEY_LENGTH, code_of
from luffy.pipeline.manifest import (
    Manifest,
    collect_outputs,
    hardware,
    hash_file,
    package_versions,
    read_manifest,
    write_manifest,
)
from luffy.pipeline.outside import outside_files
from luffy.pipeline.workspace import Workspace, claiming, find_workspace, link
from luffy.report.evaluation_page import PAGE_FILE, SUMMARY_FILE, write_summaries

Model = Annotated[
    str | None,
    Option(
        metavar="MODEL",
        help="a Hugging Face folder, a stage's directory, a hub id, or api:NAME served at --url; with --responses a "
        "name to show",
    ),
]
Suites = Annotated[
    list[str] | None,
    Option(
        "--suite",
        metavar="[NAME=]SUITE",
        help="problems, in place of the experiment's: a .parquet, .jsonl or .csv file, a benchmark by name (aime24), "
        "an environment (guess_number, verifiers:ID, reasoning_gym:TASK), or a source in YAML; may be repeated",
    ),
]
Steps = Annotated[
    str | None, Option(metavar="N,N,...", help="RL steps of the experiment's own run whose checkpoints were kept")
]
Template = Annotated[
    str | None, Option(metavar="NAME", help="chat template: a shipped name or a Jinja file [the model's]")
]
Urls = Annotated[
    list[str] | None,
    Option("--url", metavar="URL", help="server of api:NAME with OpenAI's protocol; repeat it for more servers"),
]
Request = Annotated[
    list[str] | None,
    Option(metavar="FIELD=VALUE", help="further field of each request to api:NAME, e.g. reasoning_effort=low"),
]
Responses = Annotated[
    list[str] | None,
    Option(
        metavar="FILE",
        help="grade what another system sampled: .parquet or .jsonl of verl or LUFFY, or with the columns problem, "
        "answer and response; may be repeated, and hold *",
    ),
]


def evaluate(
    config: Annotated[
        str | None, config_argument(f"{CONFIG_HELP}; --model with --suite, and --responses, need none")
    ] = None,
    overrides: Overrides = None,
    model: Model = None,
    suites: Suites = None,
    steps: Steps = None,
    chat_template: Template = None,
    urls: Urls = None,
    request: Request = None,
    responses: Responses = None,
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
    where = find_workspace(workspace)
    if responses:
        others: dict[str, object] = {"--steps": steps, "--suite": suites, "--url": urls, "--request": request}
        others |= {"--chat-template": chat_template, "--dry-run": dry_run, "--verify": verify}
        if extra := [name for name, value in others.items() if value]:
            raise ConfigError(f"{extra[0]} has no effect with --responses; remove it")
        experiment = None if config is None else load_experiment(config, overrides or ())
        evaluate_responses(where, responses, experiment, model)
        return EXIT_OK
    if config is not None and "=" in config and model is not None and suites:  # the first override
        overrides, config = [config, *(overrides or ())], None
    try:
        at = tuple(sorted({int(part) for part in steps.split(",")})) if steps is not None else ()
    except ValueError:
        raise BadParameter(f"{steps!r} is not of the form 100,200,300", param_hint="--steps") from None
    fields = dict(_request_field(text) for text in request or ())
    wanted = EvaluatedModel(model, at, chat_template, tuple(urls or ()), fields, tuple(suites or ()))
    experiment = evaluation(config, overrides or (), wanted)
    if dry_run:
        show_plan(experiment, where, verify=verify, sweep_steps=at)
        return EXIT_OK
    check_checkpoints(experiment, at, where)
    check([experiment], where, sweep_steps=at)
    parameters = {"config_file": config, "overrides": overrides or [], **wanted.given(), "verify": verify}
    opened = partial(open_experiment, experiment, where, verify=verify, sweep_steps=at)
    flow = "luffy.flows.evaluate_checkpoint:evaluate_checkpoint"
    return launch(flow, parameters, where, lambda: opened().plan(), debug=debug)


def _request_field(text: str) -> tuple[str, JsonValue]:
    """`reasoning_effort=low`, the value in YAML."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise BadParameter(f"{text!r} is not of the form field=value", param_hint="--request")
    try:
        return name, parse_scalar(value)
    except YAMLError:
        raise BadParameter(f"{text!r}: the value is not valid YAML", param_hint="--request") from None


def evaluate_responses(
    workspace: Workspace, patterns: Sequence[str], experiment: ExperimentConfig | None, model: str | None
) -> None:
    """Grade responses that another system sampled and print the accuracies; the workspace gets a run and its stage.

    `experiment` says how to grade, `model` names the row of the leaderboard (None: the first file's name). Equal files
    that were graded before by the same code are not graded again. Raises DataError as `read_responses`.
    """
    files = [path for pattern in patterns for path in expand_pattern(pattern) or (Path(pattern),)]
    name, grading = model or files[0].stem, GradingConfig() if experiment is None else experiment.grading
    problems = read_responses(files, grading)
    config = experiment.evaluation if experiment is not None else None
    config = config or EvaluationConfig(max_response_tokens=1)  # which no response is cut by
    suites = {suite: each.model_dump(mode="json") for suite, each in config.suites.items()}
    settings = {
        "evaluation": {"decodings": {DECODING: {}}, "suites": suites},
        "grading": grading.model_dump(mode="json"),
    }
    execution = ExecutionConfig() if experiment is None else experiment.execution
    execution = execution.model_copy(update={"grader_workers": os.cpu_count() or 1})
    outside = [outside_files(each) for each in (grading, config)]
    made_from = [name, settings, config.confidence, [hash_file(path) for path in files], outside]
    code = code_of("evaluate", STAGE_KINDS["evaluate"].rooms)
    key = hashlib.sha256(json.dumps([made_from, code], sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]
    directory, node = workspace.stage_directory("evaluate", key), "evaluate_responses"
    manifest, began = read_manifest(directory), datetime.now(UTC).isoformat()
    if manifest is not None and not manifest.damaged(directory):
        say("graded before")
    else:
        workspace.prepare()
        with (
            claiming(workspace),
            GraderPool.configured(
                execution, grading, directory / JUDGE_CACHE, config.own_graders, check_functions=False
            ) as pool,
        ):
            write_responses(directory, name, problems, config, pool, write_summaries)
            outputs = collect_outputs(directory, (SAMPLES_FILE, RESULTS_FILE, SUMMARY_FILE, PAGE_FILE))
            ended = datetime.now(UTC).isoformat()
            manifest = Manifest(
                stage="evaluate", node=node, key=key, series=None, settings=settings, upstream={},
                consumed={"model": hashlib.sha256(name.encode()).hexdigest()}, outputs=outputs, metrics={},
                execution=ExecutionConfig(), versions=package_versions(), hardware=hardware(), started=began,
                ended=ended,
            )  # fmt: skip
            write_manifest(directory, manifest)
            stage = {"key": key, "directory": str(directory), "action": "graded", "reason": ", ".join(map(str, files))}
            experiment_name = run_name(name)
            record = {"experiment": experiment_name, "state": "finished", "started": began, "updated": ended}
            run = workspace.new_run(experiment_name, {**record, "stages": {node: stage}, "config": {}})
            link(directory, run / "stages" / node)
    show_results([directory])
    say(f"{sum(len(problem.responses) for problem in problems)} responses to {len(problems)} problems: {directory}")

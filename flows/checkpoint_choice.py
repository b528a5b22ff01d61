"""What `flows/evaluate_checkpoint.py` is asked for: one model, or the checkpoints of an RL run."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace

from luffy.pipeline.checkpoints import complete_checkpoints
from pydantic import JsonValue
from yaml import YAMLError

from flows.front import Question, Work
from luffy.config import ExperimentConfig, load_experiment
from luffy.config.of_checkpoint import evaluation_of, sweep_of
from luffy.config.yaml_source import parse_scalar
from luffy.errors import ConfigError, DataError
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace

_EXAMPLES = """\
  python flows/evaluate_checkpoint.py exp_configs/arithmetic.yaml --model workspace/runs/arithmetic-1/stages/rl
  python flows/evaluate_checkpoint.py exp_configs/own_data.yaml --model Qwen/Qwen2.5-0.5B-Instruct
  python flows/evaluate_checkpoint.py exp_configs/arithmetic.yaml --steps 80,100
  python flows/evaluate_checkpoint.py exp_configs/arithmetic.yaml --model api:NAME --url http://127.0.0.1:8080/v1
"""


def choose(
    config: ExperimentConfig,
    model: str | None,
    steps: tuple[int, ...],
    chat_template: str | None,
    urls: Sequence[str] = (),
    request: Mapping[str, JsonValue] | None = None,
) -> Work:
    """What to run for one of `model` and `steps`; raises ConfigError for both, neither, or what does not fit."""
    if (model is None) == (not steps):
        raise ConfigError(
            "give one of --model (a folder, a hub id or api:NAME) and --steps (of the experiment's RL run); as "
            "parameters of a deployment: model with steps=[], or steps alone"
        )
    of_model = {"chat_template": chat_template, "urls": list(urls), "request": dict(request or {})}
    if model is not None:
        chosen = evaluation_of(config, model, chat_template, urls=urls, request=request)
        return Work(chosen, parameters={"model": model} | {name: value for name, value in of_model.items() if value})
    for name, option in (("chat_template", "--chat-template"), ("urls", "--url"), ("request", "--request")):
        if of_model[name]:
            raise ConfigError(f"{option} has no effect with --steps, whose models are those of their run; remove it")
    return Work(sweep_of(config, steps), steps, {"steps": list(steps)})


def check_checkpoints(work: Work, workspace: Workspace) -> None:
    """Raise DataError unless the RL run of a sweep is finished and has kept the checkpoints, or all is evaluated."""
    if not work.sweep_steps:
        return
    plans = {
        plan.node.name: plan for plan in open_experiment(work.config, workspace, sweep_steps=work.sweep_steps).plan()
    }
    if plans["sweep"].action == "reuse":
        return
    rl = plans["rl"]
    if rl.action != "reuse":
        reason = f"{rl.headline}: {rl.reason}" if rl.reason else rl.headline
        raise DataError(
            f"--steps: the RL run of {work.config.name} is not finished in {workspace.root} ({reason}); make it first, "
            "by flows/full_pipeline.py with the same experiment and overrides"
        )
    there = complete_checkpoints(rl.directory)
    missing = [step for step in work.sweep_steps if step not in there]
    if missing:
        raise DataError(
            f"--steps: {rl.directory} has no checkpoint of {_words(missing)}; there are: {_words(sorted(there))} "
            "(execution.checkpoint says how many a run keeps)"
        )


def _words(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _steps(text: str) -> tuple[int, ...]:
    """`100,200,300`, in ascending order."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 100,200,300") from None


def _field(text: str) -> tuple[str, JsonValue]:
    """`reasoning_effort=low`, the value in YAML."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form field=value")
    try:
        return name, parse_scalar(value)
    except YAMLError:
        raise argparse.ArgumentTypeError(f"{text!r}: the value is not valid YAML") from None


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="a Hugging Face folder, a stage's directory, a hub id, or api:NAME for a model at --url"
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        help="where api:NAME is served, as OpenAI's clients take it (repeat it for more servers); its key is taken "
        "from the environment variable that execution.server.api_key_variable names ($OPENAI_API_KEY)",
    )
    parser.add_argument(
        "--request",
        action="append",
        default=[],
        type=_field,
        metavar="FIELD=VALUE",
        help="a further field of each request to api:NAME, e.g. reasoning_effort=low; seed=null leaves the seed out",
    )
    parser.add_argument("--steps", type=_steps, default=(), help="RL steps whose checkpoints are there, e.g. 100,200")
    parser.add_argument("--chat-template", help="of --model, in place of its own: a shipped name or a Jinja file")


def _work(options: argparse.Namespace) -> Work:
    config = load_experiment(options.config, options.overrides)
    work = choose(config, options.model, options.steps, options.chat_template, options.url, dict(options.request))
    return replace(work, also_check=check_checkpoints)


QUESTION = Question(examples=_EXAMPLES, add_options=_add_options, work=_work)

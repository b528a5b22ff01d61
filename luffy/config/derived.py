"""Experiments derived from another: the evaluation of a model, or of its RL checkpoints; also by defaults alone."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from pydantic import JsonValue, ValidationError
from yaml import YAMLError

from luffy.config.chain import plain_stages
from luffy.config.data import DataConfig, VerifiersPackage
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import ExecutionConfig, ServerConfig
from luffy.config.experiment import ExperimentConfig
from luffy.config.load import load_experiment
from luffy.config.model import GGUF, EndpointModel, ModelConfig, model_name
from luffy.config.shipped import recipe_files, template_file, template_names
from luffy.config.stage_kinds import StageName
from luffy.config.strict import run_name
from luffy.config.yaml_source import Value, nearest, parse_scalar
from luffy.errors import ConfigError
from luffy.model_shape import positions_of

_MOST_TOKENS = 2048
"""Limit of a response where no experiment sets one, or half of a smaller context."""
_NUM_PROBLEMS = 64
_GENERATED: Mapping[str, Mapping[str, JsonValue]] = {
    "arithmetic": {"num_operations": [2, 3]},
    "guess_number": {},
}
"""Sources that `--suite` takes by their kinds alone, with their settings."""
_SUFFIXES = (".parquet", ".jsonl", ".csv")
_NAMED_SUITE = re.compile(r"(?P<name>[a-z0-9][a-z0-9_.-]*)=(?P<source>.+)", re.DOTALL)
_ENDPOINT = "api:"
"""Prefix of the name of a model served by an API."""
_STAGES: tuple[StageName, ...] = ("prepare_data", "base", "evaluate", "report")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_Evaluation = tuple[ModelConfig, EvaluationConfig, ExecutionConfig]


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """What is to be evaluated: one of `model` and `steps`."""

    model: str | None = None
    """A folder, a hub id or `api:NAME`."""
    steps: tuple[int, ...] = ()
    """Steps of the experiment's own RL run whose checkpoints were kept."""
    chat_template: str | None = None
    urls: tuple[str, ...] = ()
    request: Mapping[str, JsonValue] = field(default_factory=dict)
    suites: tuple[str, ...] = ()
    """What to evaluate on in place of the experiment's suites, each as `--suite` takes it."""

    def given(self) -> dict[str, object]:
        """The fields that are not empty, as parameters of a flow."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if value}


def evaluation(config_file: str | None, overrides: Sequence[str], wanted: EvaluatedModel) -> ExperimentConfig:
    """The experiment that evaluates `wanted` by the suites and protocol of a file.

    Without a file the model answers each problem of `wanted.suites` once, greedily, in its own chat format, with up to
    2,048 tokens or half of its context. Raises ConfigError for what does not fit.
    """
    of_suites = _overrides_of_suites(wanted.suites)
    if config_file:
        only = [f"evaluation.only={json.dumps(list(of_suites))}"] if of_suites else []
        return evaluated(load_experiment(config_file, [*_as_overrides(of_suites), *only, *overrides]), wanted)
    if wanted.model is None or not of_suites:
        raise ConfigError("give the experiment that says how to evaluate (CONFIG), or --model and --suite")
    path, served = _real_folder(wanted.model) or wanted.model, wanted.model.startswith(_ENDPOINT)
    context = positions_of(ModelConfig(path=path)) if (Path(path) / "config.json").is_file() else None
    most = min(_MOST_TOKENS, (context or 2 * _MOST_TOKENS) // 2)
    called = {"endpoint": {"name": path.removeprefix(_ENDPOINT)}} if served else {"path": path}
    bare: dict[str, Value] = {
        "name": run_name(model_name(called) or path),
        "stages": list(_STAGES),
        "data": {"suites": {}, "max_prompt_tokens": most, "max_trace_tokens": most},
        "model": {"path": path},
        "evaluation": {"decodings": {"greedy": {"temperature": 0.0}}, "max_response_tokens": most},
    }
    return evaluated(load_experiment(bare, [*_as_overrides(of_suites), *overrides]), wanted)


def _overrides_of_suites(texts: Sequence[str]) -> dict[str, dict[str, JsonValue]]:
    """The sources that `--suite` names, by the names of their suites."""
    found: dict[str, dict[str, JsonValue]] = {}
    for text in texts:
        match = _NAMED_SUITE.fullmatch(text)
        name, source = _source(match["source"] if match else text)
        name = match["name"] if match else run_name(name)
        if name in found:
            raise ConfigError(f"--suite {text}: there is a suite {name} already; give --suite NAME={text}")
        found[name] = source
    return found


def _source(text: str) -> tuple[str, dict[str, JsonValue]]:
    """The name and the source of a file, a benchmark, an environment or a source in YAML."""
    kind, _, inner = text.partition(":")
    if text.startswith("{"):
        try:
            source = parse_scalar(text)
        except YAMLError:
            source = None
        if not isinstance(source, dict) or not isinstance(source.get("kind"), str):
            raise ConfigError(f"--suite {text}: is no source in YAML; such as {{kind: file, path: FILE}}")
        return str(source["kind"]), source
    if text.endswith(_SUFFIXES) or Path(text).is_file():
        return Path(text).stem.replace("*", ""), {"kind": "file", "path": text}
    if text in recipe_files():
        return text, {"kind": "recipe", "name": text}
    if text in _GENERATED:
        return text, {"kind": text, "num_prompts": _NUM_PROBLEMS, **_GENERATED[text]}
    if kind == "reasoning_gym" and inner:
        return inner, {"kind": kind, "tasks": [inner], "num_prompts": _NUM_PROBLEMS}
    if kind == "verifiers" and inner:
        return inner, {"kind": kind, "environment": inner, "python": sys.executable, "num_prompts": _NUM_PROBLEMS}
    names = [*recipe_files(), *_GENERATED]
    raise ConfigError(
        f"--suite {text}: no such file; {nearest(text, names, 'did you mean {!r}? ')}give a {', '.join(_SUFFIXES)} "
        f"file, {', '.join(names)}, reasoning_gym:TASK, verifiers:ENVIRONMENT, or a source in YAML"
    )


def _as_overrides(suites: Mapping[str, Mapping[str, JsonValue]]) -> list[str]:
    """`suites` as overrides, with the environment that answers, where one of them is the tasks of one."""
    played = [source for source in suites.values() if source["kind"] in ("guess_number", "verifiers")]
    if played and len(suites) > 1:
        raise ConfigError(f"--suite: {played[0]['kind']} is an environment, which a run has one of; evaluate it alone")
    texts = [f"data.suites={json.dumps(suites)}"] if suites else []
    for source in played:
        shared = {"kind", *VerifiersPackage.model_fields} & {*source}
        texts.append(f"environment={json.dumps({name: source[name] for name in sorted(shared)})}")
    return texts


def evaluated(config: ExperimentConfig, wanted: EvaluatedModel) -> ExperimentConfig:
    """The chain that evaluates `wanted` as `config` evaluates its own checkpoints.

    A folder or hub id keeps its own chat template unless one is given; `api:NAME` is served at the URLs (those of
    `execution.server` without any) and asked with `wanted.request` (`EndpointModel.request`). Raises ConfigError for
    what does not fit, a folder without a model, a URL that cannot be right, or an experiment without a protocol.
    """
    if (wanted.model is None) == (not wanted.steps):
        raise ConfigError(
            "give one of --model (a folder, a hub id or api:NAME) and --steps (of the experiment's RL run); as "
            "parameters of a deployment: model with steps=[], or only steps"
        )
    if wanted.model is None:
        for name, option in (("chat_template", "--chat-template"), ("urls", "--url"), ("request", "--request")):
            if name in wanted.given():
                raise ConfigError(
                    f"{option} has no effect with --steps, whose models are those of their run; remove it"
                )
        return sweep_of(config, wanted.steps)
    data, choose = config.data, _of_endpoint if wanted.model.startswith(_ENDPOINT) else _of_folder
    try:
        policy, evaluation, execution = choose(config, wanted, wanted.model)
        return ExperimentConfig(
            name=config.name,
            stages=plain_stages(_STAGES),
            seed=config.seed,
            data=DataConfig(
                suites=data.suites,
                max_prompt_tokens=data.max_prompt_tokens,
                max_trace_tokens=data.max_trace_tokens,
                remove_system=data.remove_system,
                system_prompt=data.system_prompt,
            ),
            model=policy,
            evaluation=evaluation,
            grading=config.grading,
            environment=config.environment,
            execution=execution,
            tracking=config.tracking,
        )
    except ValidationError as error:
        complaints = [
            (f"--url {found['input']}: " if found["loc"][:1] == ("urls",) else "")
            + found["msg"].removeprefix("Value error, ")
            for found in error.errors()
        ]
        raise ConfigError("; ".join(complaints)) from None


def _of_folder(config: ExperimentConfig, wanted: EvaluatedModel, model: str) -> _Evaluation:
    """A local folder goes by its real path, so that every way to name it is the same model; a hub id as it is."""
    if option := "--url" if wanted.urls else "--request" if wanted.request else None:
        raise ConfigError(f"{option} has no effect on a model folder; remove it, or give --model api:NAME")
    chat_template = wanted.chat_template
    if chat_template is not None and not template_file(chat_template).is_file():
        raise ConfigError(
            f"--chat-template: {chat_template}: no such file; give {', '.join(template_names())} or the path of a "
            f"Jinja file, which starts at {Path.cwd()}"
        )
    evaluation, own = _protocol(config), config.model
    policy = ModelConfig(
        path=_given_model(model), dtype=own.dtype, chat_template=chat_template, template_date=own.template_date
    )
    if own.path is not None and (_real_folder(own.path) or own.path) == policy.path:  # in the experiment's own context
        context = {"rope_theta": own.rope_theta, "max_position_embeddings": own.max_position_embeddings}
        policy = policy.model_copy(update=context)
    return policy, evaluation, config.execution


def _given_model(model: str) -> str:
    """What --model names: the real path of a model folder, also of a stage's, else the GGUF file or hub id as it is.

    Raises ConfigError for a path without a model.
    """
    path, folder = Path(model).expanduser(), _real_folder(model)
    if folder is None and path.is_dir():
        raise ConfigError(f"--model: {model} has no config.json; give a Hugging Face model folder or a hub id")
    if folder is None and path.exists() and path.suffix != GGUF:
        raise ConfigError(f"--model: {model} is a file; give a Hugging Face model folder, a {GGUF} file or a hub id")
    if folder is None and not path.exists() and _HUB_ID.fullmatch(model) is None:
        raise ConfigError(
            f"--model: {model}: no such folder; relative paths start at {Path.cwd()}, a run's policy is in "
            "workspace/runs/RUN/stages/rl, and a hub id is OWNER/NAME"
        )
    return folder or model


def _of_endpoint(config: ExperimentConfig, wanted: EvaluatedModel, model: str) -> _Evaluation:
    name = model.removeprefix(_ENDPOINT)
    if not name:
        raise ConfigError("--model: api: names no model; give api:NAME with the model's name at the endpoint")
    if wanted.chat_template is not None:
        raise ConfigError(
            "--chat-template has no effect on a model served by an endpoint, which has its own; remove it"
        )
    evaluation, server = _protocol(config), config.execution.server
    if wanted.urls:
        server = ServerConfig.model_validate({**server.model_dump(), "urls": wanted.urls})
    if not server.urls:
        raise ConfigError(
            f"--url: missing; say where {name} is served, e.g. --url http://127.0.0.1:8000/v1 (as a parameter of a "
            "deployment: urls)"
        )
    return (
        ModelConfig(endpoint=EndpointModel(name=name, request=dict(wanted.request))),
        evaluation.model_copy(update={"engine": "openai"}),
        config.execution.model_copy(update={"server": server}),
    )


def sweep_of(config: ExperimentConfig, steps: tuple[int, ...]) -> ExperimentConfig:
    """The chain up to RL for evaluating its checkpoints of `steps`; ConfigError without RL, protocol or such steps."""
    _protocol(config)
    names = list(config.stages)
    if "rl" not in config.kinds:
        raise ConfigError(f"--steps: {config.name} has no stage rl; its stages are {', '.join(names)}")
    last = [name for name in names if config.stages[name].kind == "rl"][-1]
    rl = config.seen_by(last).rl
    assert rl is not None
    if beyond := [step for step in steps if not 1 <= step <= rl.steps]:
        raise ConfigError(f"--steps: {beyond[0]} is not among the {rl.steps} steps of rl.steps")
    kept = names[: names.index(last) + 1]
    asked = next((config.seen_by(name).evaluation for name in names if config.stages[name].kind == "evaluate"), None)
    stages = {name: config.stages[name] for name in kept}
    return config.model_copy(update={"stages": stages, "evaluation": asked or config.evaluation})


def _protocol(config: ExperimentConfig) -> EvaluationConfig:
    if config.evaluation is None:
        raise ConfigError(f"evaluation: missing; {config.name} must define the evaluation protocol")
    return config.evaluation


def _real_folder(model: str) -> str | None:
    """The real path of the local folder `model`, or of the model in that stage's directory; None without one."""
    path = Path(model).expanduser()
    found = next((folder for folder in (path, path / "model") if (folder / "config.json").is_file()), None)
    return None if found is None else str(found.resolve())

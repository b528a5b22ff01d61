"""Builds the experiment that shows a model in an environment given by name (`luffy eval`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from luffy.config.derived import evaluation_of
from luffy.config.experiment import ExperimentConfig
from luffy.config.load import experiment_of_values, read_overridden
from luffy.config.verifiers_package import VerifiersPackage
from luffy.config.yaml_source import Value
from luffy.errors import ConfigError

_CHAINS: dict[str, Value] = {
    "kind": "arithmetic",
    "num_operations": [2, 3],
    "operations": {"add": 1, "subtract": 1, "multiply": 4},
}
_BUILT_IN: dict[str, tuple[dict[str, Value], dict[str, Value]]] = {
    "guess_number": ({"kind": "guess_number"}, {"kind": "guess_number"}),
    "five_letters": ({"kind": "five_letters"}, {"kind": "five_letters"}),
    "calculator": ({"kind": "tools", "tools": ["calculator"]}, _CHAINS),
    "python": ({"kind": "tools", "tools": ["python"]}, _CHAINS),
}
"""The environments that have a name, each with the source of its problems."""
DECODING = "look"
"""Name of the one decoding."""
_SUITE = "problems"
_MAX_PROMPT_TOKENS = 1_000_000
"""Suites keep prompts of any length."""
_OWN_SECTIONS = ("environment", "data", "grading", "seed")
"""Sections of a YAML file that count; those of training do not."""


@dataclass(frozen=True, slots=True)
class EnvironmentLook:
    """The environment to show, and the model that plays in it."""

    target: str
    """A built-in environment, a YAML file with a section `environment`, or the id of an environment of verifiers."""
    model: str
    """A folder, a hub id or `api:NAME`."""
    num_problems: int
    num_samples: int = 1
    temperature: float = 1.0
    max_response_tokens: int = 2048
    chat_template: str | None = None
    urls: tuple[str, ...] = ()
    python: str | None = None
    """The interpreter of an environment of verifiers."""
    arguments: Mapping[str, JsonValue] | None = None
    """Given to its `load_environment`."""


def look_config(look: EnvironmentLook) -> ExperimentConfig:
    """The experiment that evaluates the model in the environment; ConfigError where the parts do not fit together."""
    sections = _sections(look)
    given = sections.get("data")
    suites = given.get("suites") if isinstance(given, dict) else None
    values: dict[str, Value] = {
        **sections,
        "name": "look",
        "stages": ["prepare_data", "base", "evaluate", "report"],
        "data": {
            "suites": suites or {_SUITE: _source(look, sections["environment"])},
            "max_prompt_tokens": _MAX_PROMPT_TOKENS,
            "max_trace_tokens": look.max_response_tokens,
        },
        "model": {"path": look.model},
        "evaluation": {
            "decodings": {DECODING: {"temperature": look.temperature, "num_samples": look.num_samples}},
            "max_response_tokens": look.max_response_tokens,
        },
    }
    config = experiment_of_values(values, given_at=look.target)
    return evaluation_of(config, look.model, look.chat_template, urls=look.urls)


def _sections(look: EnvironmentLook) -> dict[str, Value]:
    """The sections of an experiment that the target gives; one of them is `environment`."""
    is_package = look.target not in _BUILT_IN and not look.target.endswith((".yaml", ".yml"))
    if look.python is not None and not is_package:
        raise ConfigError("--python has no effect here: it runs environments of the package verifiers; remove it")
    if look.arguments and not is_package:
        raise ConfigError("--argument has no effect here: it is for environments of the package verifiers; remove it")
    if look.target in _BUILT_IN:
        return {"environment": dict(_BUILT_IN[look.target][0])}
    return {"environment": _package(look)} if is_package else _of_file(Path(look.target))


def _of_file(path: Path) -> dict[str, Value]:
    values, _ = read_overridden(path)
    environment = values.get("environment")
    if not isinstance(environment, dict):
        raise ConfigError(f"{path}: has no section environment; add one (docs/environments.md)")
    if isinstance(scoring := environment.get("scoring"), dict):  # rewards, which an evaluation has not
        own = {name: value for name, value in scoring.items() if name not in ("group_measures", "weights")}
        values = {**values, "environment": {**environment, "scoring": own}}
    return {name: values[name] for name in _OWN_SECTIONS if name in values}


def _package(look: EnvironmentLook) -> dict[str, Value]:
    if look.python is None:
        raise ConfigError(
            f"{look.target}: is neither a YAML file nor one of {', '.join(_BUILT_IN)}; for an environment of the "
            "package verifiers, --python has to name the interpreter in which it is installed"
        )
    return {
        "kind": "verifiers",
        "environment": look.target,
        "python": look.python,
        "arguments": dict(look.arguments or {}),
    }


def _source(look: EnvironmentLook, environment: Value) -> dict[str, Value]:
    """The source of the problems if the target names none; ConfigError if there is no default."""
    if look.target in _BUILT_IN:
        return {**_BUILT_IN[look.target][1], "num_prompts": look.num_problems}
    fields = environment if isinstance(environment, dict) else {}
    if fields.get("kind") == "verifiers":
        named = {name: value for name, value in fields.items() if name in VerifiersPackage.model_fields}
        return {
            "kind": "verifiers",
            "split": "eval",
            "equal_prompts": True,
            **named,
            "num_prompts": look.num_problems,
        }
    if (kind := fields.get("kind")) in ("guess_number", "five_letters"):
        return {"kind": kind, "num_prompts": look.num_problems}
    raise ConfigError(f"{look.target}: names no problems; add data.suites, e.g. {{mine: {{kind: file, path: F}}}}")

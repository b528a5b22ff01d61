"""Python functions as tools: name, description and parameters from the signature and the docstring.

    def distance(start: str, end: str, unit: Literal["km", "miles"] = "km") -> float:
        \"\"\"Distance between two cities.

        Args:
            start: A city.
            end: Another city.
        \"\"\"

    tool = tool_of(distance)
    tool.schema                                                   # as OpenAI's protocol and chat templates have it
    tool.read({"start": "Berlin", "end": "Rome", "unit": "km"})   # keyword arguments of the function

The function may be asynchronous. What it returns is shown to the policy: text as it is, anything else as JSON.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from luffy.environments.calculator import calculator
from luffy.environments.episode_state import EpisodeState
from luffy.environments.tool_docs import described
from luffy.environments.tool_schemas import Schema, UnsupportedType, schema_of
from luffy.errors import ConfigError
from luffy.import_paths import imported_setting

Function = Callable[..., object]
BUILT_IN_TOOLS: Mapping[str, Function] = {"calculator": calculator}

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_UNREADABLE = "it is nested too deep, or is no valid Unicode"
"""What may be wrong with a value that was JSON when the call was parsed."""
_MAX_FAULTS = 3
"""Faults of one argument that its message lists."""
_MAX_NAME = 80
"""Longer names that the policy made up are truncated in messages."""


class WrongArguments(Exception):
    """A call's arguments do not fit the tool; the message tells the policy which, and why."""


@dataclass(frozen=True, slots=True)
class ToolParameter:
    """A parameter that the policy passes."""

    schema: Schema
    is_required: bool
    adapter: TypeAdapter[object] = field(repr=False)

    def read(self, value: object) -> object:
        """Return the value as the function's annotation wants it; WrongArguments where it is of another type."""
        try:
            # Validated as JSON, where a member of an Enum is its value.
            return self.adapter.validate_json(json.dumps(value))
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_FAULTS]
            raise WrongArguments("; ".join(map(_fault, faults))) from None
        except RecursionError:
            raise WrongArguments(_UNREADABLE) from None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: str
    parameters: Mapping[str, ToolParameter]
    function: Function
    is_async: bool
    state_parameter: str | None = None
    """Parameter that takes the episode's state."""
    limits_itself: bool = False
    """Whether the tool limits every call itself, so that `environment.timeout_s` does not apply."""

    @property
    def schema(self) -> Schema:
        """The tool in the form of OpenAI's protocol, which chat templates take as `tools`."""
        parameters = {
            "type": "object",
            "properties": {name: parameter.schema for name, parameter in self.parameters.items()},
            "required": [name for name, parameter in self.parameters.items() if parameter.is_required],
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def read(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return the function's keyword arguments; WrongArguments names every argument that does not fit."""
        faults = [f"missing argument `{name}`" for name in self._required() if name not in arguments]
        unknown = [f"unknown argument `{name[:_MAX_NAME]}`" for name in arguments if name not in self.parameters]
        faults += unknown[:_MAX_FAULTS]
        known: dict[str, object] = {}
        for name, parameter in self.parameters.items():
            if name in arguments:
                try:
                    known[name] = parameter.read(arguments[name])
                except WrongArguments as fault:
                    faults.append(f"`{name}`: {fault}")
        if faults:
            taken = f"it takes {', '.join(self.parameters)}" if self.parameters else "it takes no arguments"
            raise WrongArguments(f"{'; '.join(faults)} ({taken})")
        return known

    def _required(self) -> Sequence[str]:
        return [name for name, parameter in self.parameters.items() if parameter.is_required]


def load_tools(names: Sequence[str], where: str, further: Mapping[str, Function] | None = None) -> dict[str, Tool]:
    """Return the tools of a configuration by their names; ConfigError, which begins with `where`, for a wrong one.

    `further`: built-in tools besides `BUILT_IN_TOOLS`, which need the configuration and limit themselves.
    """
    built_in = {**BUILT_IN_TOOLS, **(further or {})}
    tools: dict[str, Tool] = {}
    for path in names:
        tool = tool_of(_function(path, built_in, where), path.rpartition(":")[2], f"{where}: {path}")
        tool = replace(tool, limits_itself=path in (further or {}))
        if tool.name in tools:
            raise ConfigError(f"{where}: two tools are called {tool.name}; rename one of the functions")
        tools[tool.name] = tool
    return tools


def tool_of(function: object, name: str | None = None, where: str = "tool") -> Tool:
    """Return a function as a tool, under its own name unless another is given; ConfigError where it cannot be one."""
    if not callable(function) or not isinstance(original := inspect.unwrap(function), FunctionType):
        raise ConfigError(f"{where} is a {type(function).__name__}; a tool is a function")
    if inspect.isgeneratorfunction(original) or inspect.isasyncgenfunction(original):
        raise ConfigError(f"{where} is a generator; a tool returns one result")
    description, texts = described(function.__doc__ or "")
    if not description:
        raise ConfigError(f"{where} has no docstring; its first paragraph tells the policy what the tool does")
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:  # noqa: BLE001 - annotations are evaluated, and may raise anything
        raise ConfigError(f"{where}: the annotations cannot be read ({type(error).__name__}: {error})") from None
    parameters: dict[str, ToolParameter] = {}
    state_parameter = None
    for parameter in inspect.signature(function).parameters.values():
        if hints.get(parameter.name) is EpisodeState:
            state_parameter = _state_parameter(parameter, where)
        else:
            parameters[parameter.name] = _parameter(parameter, hints, texts.get(parameter.name), where)
    if strangers := [text for text in texts if text not in parameters and text != state_parameter]:
        raise ConfigError(f"{where}: the docstring describes `{strangers[0]}`, which is no parameter")
    is_async = any(map(inspect.iscoroutinefunction, (function, original)))  # a decorator may change this
    return Tool(name or original.__name__, description, parameters, function, is_async, state_parameter)


def _function(path: str, built_in: Mapping[str, Function], where: str) -> object:
    if ":" in path:
        return imported_setting(path, where)
    if path not in built_in:
        raise ConfigError(
            f"{where}: there is no built-in tool {path!r}; there are: {', '.join(built_in)}; "
            "a function of your own is package.module:function"
        )
    return built_in[path]


def _state_parameter(parameter: inspect.Parameter, where: str) -> str:
    if parameter.kind is not parameter.KEYWORD_ONLY:
        raise ConfigError(f"{where}: `{parameter.name}: EpisodeState` has to be keyword-only; put it after a `*`")
    return parameter.name


def _parameter(
    parameter: inspect.Parameter, hints: Mapping[str, object], description: str | None, where: str
) -> ToolParameter:
    place = f"{where}: parameter `{parameter.name}`"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ConfigError(f"{place} is {parameter.kind.description}; a tool's parameters can be given by name")
    if parameter.name not in hints:
        raise ConfigError(f"{place} has no type; annotate it")
    annotation = hints[parameter.name]
    try:
        schema = schema_of(annotation)
    except UnsupportedType as error:
        raise ConfigError(f"{place}: {error}") from None
    if description and "description" not in schema:
        schema["description"] = description
    adapter: TypeAdapter[object] = TypeAdapter(cast(type[object], annotation), config=_STRICT)
    is_required = parameter.default is parameter.empty
    if not is_required:
        try:
            adapter.validate_python(parameter.default)
        except ValidationError:
            raise ConfigError(f"{place}: the default {parameter.default!r} is not of the annotated type") from None
    return ToolParameter(schema, is_required, adapter)


def _fault(found: ErrorDetails) -> str:
    if found["type"] == "json_invalid":
        return _UNREADABLE
    path = "".join(f"[{str(step)[:_MAX_NAME]}]" for step in found["loc"])
    return f"{path}: {found['msg']}" if path else found["msg"]

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

import enum
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Literal, Union, cast, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from luffy.environments.calculator import calculator
from luffy.environments.environment import EpisodeState
from luffy.errors import ConfigError
from luffy.import_paths import imported_setting

Schema = dict[str, object]
Function = Callable[..., object]
BUILT_IN_TOOLS: Mapping[str, Function] = {"calculator": calculator}

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)
_UNREADABLE = "it is nested too deep, or is no valid Unicode"
"""What may be wrong with a value that was JSON when the call was parsed."""
_MAX_FAULTS = 3
"""Faults of one argument that its message lists."""
_MAX_NAME = 80
"""Longer names that the policy made up are truncated in messages."""
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Note|Notes|Example|Examples):\s*$", re.M)
_PARAMETERS = ("Args", "Arguments", "Parameters")
_INDENTED = re.compile(r"(?:[ \t].*\n?|\n)*")
_NAMED = r"[ \t]*(?:\([^()\n]*\))?:[ \t]*"
_ENTRY = re.compile(rf"^\*{{0,2}}(\w+){_NAMED}(.*(?:\n(?!\*{{0,2}}\w+{_NAMED}).*)*)", re.M)
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
_SUPPORTED = (
    "str, int, float, bool, list[...], dict[str, ...], Literal, an Enum, X | None, Annotated[X, 'a description']"
)


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
            faults = []
            for found in error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_FAULTS]:
                path = "".join(f"[{str(step)[:_MAX_NAME]}]" for step in found["loc"])
                fault = f"{path}: {found['msg']}" if path else found["msg"]
                faults.append(_UNREADABLE if found["type"] == "json_invalid" else fault)
            raise WrongArguments("; ".join(faults)) from None
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
        required = [name for name, parameter in self.parameters.items() if parameter.is_required]
        faults = [f"missing argument `{name}`" for name in required if name not in arguments]
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


def load_tools(names: Sequence[str], where: str, further: Mapping[str, Function] | None = None) -> dict[str, Tool]:
    """Return the tools of a configuration by their names; ConfigError, which begins with `where`, for a wrong one.

    `further`: built-in tools besides `BUILT_IN_TOOLS`, which need the configuration and limit themselves.
    """
    built_in = {**BUILT_IN_TOOLS, **(further or {})}
    tools: dict[str, Tool] = {}
    for path in names:
        if ":" not in path and path not in built_in:
            raise ConfigError(
                f"{where}: there is no built-in tool {path!r}; there are: {', '.join(built_in)}; "
                "a function of your own is package.module:function"
            )
        function = imported_setting(path, where) if ":" in path else built_in[path]
        tool = tool_of(function, path.rpartition(":")[2], f"{where}: {path}")
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
            if parameter.kind is not parameter.KEYWORD_ONLY:
                raise ConfigError(
                    f"{where}: `{parameter.name}: EpisodeState` has to be keyword-only; put it after a `*`"
                )
            state_parameter = parameter.name
            continue
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
        if (text := texts.get(parameter.name)) and "description" not in schema:
            schema["description"] = text
        adapter: TypeAdapter[object] = TypeAdapter(cast(type[object], annotation), config=_STRICT)
        is_required = parameter.default is parameter.empty
        if not is_required:
            try:
                adapter.validate_python(parameter.default)
            except ValidationError:
                raise ConfigError(f"{place}: the default {parameter.default!r} is not of the annotated type") from None
        parameters[parameter.name] = ToolParameter(schema, is_required, adapter)
    if strangers := [text for text in texts if text not in parameters and text != state_parameter]:
        raise ConfigError(f"{where}: the docstring describes `{strangers[0]}`, which is no parameter")
    is_async = any(map(inspect.iscoroutinefunction, (function, original)))  # a decorator may change this
    return Tool(name or original.__name__, description, parameters, function, is_async, state_parameter)


def described(docstring: str) -> tuple[str, Mapping[str, str]]:
    """Return the first paragraph as one line, "" without any, and the parameters' descriptions by name.

    These are in a Google-style section `Args:`: an indented `name: text` each, continued by lines that are indented
    further.
    """
    first, *sections = _SECTION.split(inspect.cleandoc(docstring))
    texts = {}
    for title, section in zip(sections[::2], sections[1::2], strict=True):
        if title in _PARAMETERS:
            indented = cast(re.Match[str], _INDENTED.match(section)).group()
            for name, text in _ENTRY.findall(textwrap.dedent(indented)):
                texts[name] = " ".join(line.strip() for line in text.splitlines() if line.strip())
    return " ".join(first.strip().split("\n\n")[0].split()), texts


class UnsupportedType(Exception):
    """An annotation that has no schema; the message says which are supported."""


def schema_of(annotation: object) -> Schema:
    """Return the JSON schema of a parameter from its annotation; UnsupportedType for one that has none.

        schema_of(list[int])                        # {"type": "array", "items": {"type": "integer"}}
        schema_of(Literal["km", "miles"])           # {"type": "string", "enum": ["km", "miles"]}
        schema_of(Annotated[int | None, "a page"])  # {"anyOf": [..., {"type": "null"}], "description": "a page"}

    The supported types are those that every model family writes as plain JSON; a schema has no references. The order
    of its keys is part of the policy's prompt.
    """
    if isinstance(annotation, type) and annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    if annotation is None:
        return {"type": "null"}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *notes = arguments
        if len(notes) != 1 or not isinstance(notes[0], str):
            raise UnsupportedType(f"Annotated takes a type and one text, its description; found {notes!r}")
        return {**schema_of(inner), "description": notes[0]}
    if origin in (Union, UnionType):
        return {"anyOf": [schema_of(argument) for argument in arguments]}
    if list in (annotation, origin):
        return {"type": "array", "items": schema_of(arguments[0]) if arguments else {}}
    if dict in (annotation, origin) and arguments[:1] in ((), (str,)):
        return {"type": "object", "additionalProperties": schema_of(arguments[1])} if arguments else {"type": "object"}
    values: list[object] = list(arguments) if origin is Literal else []
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        values = [member.value for member in annotation]
    if values and all(type(value) in (str, int, bool) for value in values):
        kinds = {_SCALARS[type(value)] for value in values}
        return {**({"type": kinds.pop()} if len(kinds) == 1 else {}), "enum": values}
    name = annotation.__name__ if isinstance(annotation, type) and not arguments else str(annotation)
    raise UnsupportedType(f"{name} is not supported; use {_SUPPORTED}")

"""Every field of an experiment, by the configuration classes: for `luffy config --fields`, completion, errors."""

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from luffy.config.experiment import ExperimentConfig
from luffy.config.strict import field_docs
from luffy.config.yaml_source import KeyPath

_NAME = "NAME"
"""Placeholder for the key of a mapping or the name of a list element."""
_KIND = "kind"
_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One field, as an override names it."""

    model: type[BaseModel]
    path: str
    type: str
    default: str | None
    """None: it has none, and a preset or the experiment has to give it."""
    is_section: bool
    """Whether it has nested fields."""

    @property
    def description(self) -> str:
        """Its docstring on one line; empty without one."""
        return " ".join(field_docs(self.model).get(self.path.rpartition(".")[2], "").split())


def all_fields(prefix: str = "") -> list[ConfigField]:
    """`prefix` and every field below it, parents first; every field without a prefix."""
    wanted = prefix.split(".") if prefix else []
    found = {field.path: field for field in _walk(ExperimentConfig, "", ())}
    return [
        field
        for path, field in found.items()
        if len(parts := path.split(".")) >= len(wanted)
        and all(part in (want, _NAME) for part, want in zip(parts, wanted, strict=False))
    ]


def children_of(path: str) -> list[ConfigField]:
    """The fields one level below `path`, in which any name matches `NAME`."""
    start = f"{path}." if path else ""
    found: dict[str, ConfigField] = {}
    for model in models_at(tuple(start.split(".")[:-1]), ExperimentConfig):
        found |= {name: _field(f"{start}{name}", info, model) for name, info in model.model_fields.items()}
    return list(found.values())


def values_of(path: str) -> list[str]:
    """The values that the field at `path` allows, where they can be listed."""
    *parent, name = path.split(".")
    values: list[object] = []
    for model in models_at(tuple(parent), ExperimentConfig):
        branches = members(model.model_fields[name].annotation) if name in model.model_fields else []
        values += [value for branch in branches if get_origin(branch) is Literal for value in get_args(branch)]
        values += [True, False] if bool in branches else []
    return [_yaml_word(value) for value in values]


def models_at(path: KeyPath, root: type[BaseModel]) -> list[type[BaseModel]]:
    """The classes of the section at `path`; elements of a list go by any name."""
    annotations: list[Any] = [root]
    for part in path:
        annotations = [below for one in annotations for below in steps(one, part) or steps(one, "0")]
    return [member for one in annotations for member in members(one) if is_model(member)]


def steps(annotation: Any, part: int | str) -> list[Any]:
    """Annotations of the values one key below `annotation`; elements of a list by their numbers."""
    found = []
    for member in members(annotation):
        if is_model(member):
            if part in member.model_fields:
                found.append(member.model_fields[str(part)].annotation)
        elif get_origin(member) is dict and "[" not in str(part):
            found.append(get_args(member)[1])
        elif get_origin(member) is tuple and str(part).isdigit():
            found.append(get_args(member)[0])
    return found


def members(annotation: Any) -> list[Any]:
    """The branches of a union, through `Annotated`; any other annotation is its own only branch."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for branch in get_args(annotation) for member in members(branch)]
    return [annotation]


def is_model(member: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(member, type) and issubclass(member, BaseModel)


def tags(member: Any) -> tuple[object, ...]:
    """The values of `kind` that choose a configuration class among others."""
    return get_args(member.model_fields[_KIND].annotation) if is_model(member) and _KIND in member.model_fields else ()


def _walk(model: type[BaseModel], prefix: str, above: tuple[type[BaseModel], ...]) -> Iterator[ConfigField]:
    if model in above:
        return
    for name, info in model.model_fields.items():
        if name != _KIND:  # the section's type lists the kinds
            yield _field(f"{prefix}{name}", info, model)
            for below, step in _sections(info.annotation):
                yield from _walk(below, f"{prefix}{name}.{step}", (*above, model))


def _sections(annotation: Any) -> list[tuple[type[BaseModel], str]]:
    """Configuration classes that a value may hold, each with the step to it: "" or `NAME.`."""
    branches = [(branch, "") for branch in members(annotation)]
    branches += [(branch, f"{_NAME}.") for one, _ in branches for below in steps(one, "0") for branch in members(below)]
    return [(branch, step) for branch, step in branches if is_model(branch)]


def _field(path: str, info: FieldInfo, model: type[BaseModel]) -> ConfigField:
    default = info.get_default(call_default_factory=True, validated_data={})
    return ConfigField(
        path=path,
        type=_type_words(info.annotation),
        default=None if default is PydanticUndefined else json.dumps(to_jsonable_python(default)),
        model=model,
        is_section=bool(_sections(info.annotation)),
    )


def _type_words(annotation: Any) -> str:
    words = []
    for branch in members(annotation):
        origin, arguments = get_origin(branch), get_args(branch)
        if origin is Literal:
            words += [_yaml_word(value) for value in arguments]
        elif origin is dict:
            words.append(f"mapping of {_type_words(arguments[1])}")
        elif origin is tuple:
            words.append(f"list of {_type_words(arguments[0])}")
        elif is_model(branch):
            words += [f"{_KIND} {kind}" for kind in tags(branch)] or ["section"]
        else:
            words.append(_WORDS.get(branch, "value"))
    return " | ".join(dict.fromkeys(words))


def _yaml_word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)

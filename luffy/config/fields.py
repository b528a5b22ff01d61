"""Every field of an experiment, read from the configuration classes; for `luffy config --fields` and completion."""

import json
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from luffy.config.experiment import ExperimentConfig
from luffy.config.field_docs import field_docs

_NAME = "NAME"
"""Placeholder for the key of a mapping or the name of a list element."""
_KIND = "kind"


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One field, as an override names it."""

    model: type[BaseModel]
    """The configuration class that has it."""
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
    found = _walk([ExperimentConfig], "", ())
    return list({field.path: field for field in found if _covers(prefix, field.path)}.values())


def children_of(path: str) -> list[ConfigField]:
    """The fields one level below `path`, in which any name matches `NAME`."""
    models = _models_at(path)
    found = {field.path: field for model in models for field in _fields_of(model, f"{path}." if path else "")}
    return list(found.values())


def values_of(path: str) -> list[str]:
    """The values that the field at `path` allows, where they can be listed."""
    parent, _, name = path.rpartition(".")
    infos = [model.model_fields[name] for model in _models_at(parent) if name in model.model_fields]
    return [_yaml_word(value) for info in infos for value in _literals(info.annotation)]


def _walk(models: list[type[BaseModel]], prefix: str, above: tuple[type[BaseModel], ...]) -> Iterator[ConfigField]:
    for model in models:
        if model in above:
            continue
        for name, info in model.model_fields.items():
            if name == _KIND:  # the section's type lists the kinds
                continue
            yield _field(f"{prefix}{name}", info, model)
            for below, step in _below(info.annotation):
                path = ".".join(filter(None, [f"{prefix}{name}", step]))
                yield from _walk(below, f"{path}.", (*above, model))


def _fields_of(model: type[BaseModel], prefix: str) -> Iterator[ConfigField]:
    for name, info in model.model_fields.items():
        yield _field(f"{prefix}{name}", info, model)


def _field(path: str, info: FieldInfo, model: type[BaseModel]) -> ConfigField:
    default = info.get_default(call_default_factory=True, validated_data={})
    return ConfigField(
        path=path,
        type=_type_words(info.annotation),
        default=None if default is PydanticUndefined else json.dumps(default, default=_plain),
        model=model,
        is_section=bool(_below(info.annotation)),
    )


def _below(annotation: Any) -> list[tuple[list[type[BaseModel]], str]]:
    """Configuration classes that a value may hold, each group with the step to it: "" or `NAME`."""
    models: list[type[BaseModel]] = []
    named: list[type[BaseModel]] = []
    for branch in _branches(annotation):
        if isinstance(branch, type) and issubclass(branch, BaseModel):
            models.append(branch)
        elif get_origin(branch) in (dict, tuple):
            element = get_args(branch)[1 if get_origin(branch) is dict else 0]
            named += [one for one in _branches(element) if isinstance(one, type) and issubclass(one, BaseModel)]
    return [(found, step) for found, step in ((models, ""), (named, _NAME)) if found]


def _models_at(path: str) -> list[type[BaseModel]]:
    """Configuration classes that hold the fields one level below `path`."""
    models: list[type[BaseModel]] = [ExperimentConfig]
    parts = path.split(".") if path else []
    while parts:
        name, *parts = parts
        groups = [group for model in models if name in model.model_fields for group in _below(_of(model, name))]
        named = [group for group, step in groups if step]
        if named and parts:
            parts = parts[1:]
            models = [model for group in named for model in group]
        else:
            models = [model for group, step in groups for model in group if not step]
    return models


def _of(model: type[BaseModel], name: str) -> Any:
    return model.model_fields[name].annotation


def _branches(annotation: Any) -> list[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _branches(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [branch for part in get_args(annotation) for branch in _branches(part)]
    return [annotation]


def _literals(annotation: Any) -> list[object]:
    branches = _branches(annotation)
    listed = [value for branch in branches if get_origin(branch) is Literal for value in get_args(branch)]
    return [*listed, *([True, False] if bool in branches else [])]


def _type_words(annotation: Any) -> str:
    words = []
    for branch in _branches(annotation):
        origin, arguments = get_origin(branch), get_args(branch)
        if origin is Literal:
            words += [_yaml_word(value) for value in arguments]
        elif origin is dict:
            words.append(f"mapping of {_type_words(arguments[1])}")
        elif origin is tuple:
            words.append(f"list of {_type_words(arguments[0])}")
        elif branch is type(None):
            words.append("null")
        elif isinstance(branch, type) and issubclass(branch, BaseModel):
            kinds = get_args(branch.model_fields[_KIND].annotation) if _KIND in branch.model_fields else ()
            words += [f"{_KIND} {kind}" for kind in kinds] or ["section"]
        else:
            words.append(
                {str: "text", int: "whole number", float: "number", bool: "true or false"}.get(branch, "value")
            )
    return " | ".join(dict.fromkeys(words))


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    assert isinstance(value, Iterable)
    return list(value)


def _yaml_word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _covers(prefix: str, path: str) -> bool:
    """Whether `path` is `prefix` or below it; a step of `path` that is `NAME` fits any name."""
    wanted, steps = prefix.split(".") if prefix else [], path.split(".")
    return len(steps) >= len(wanted) and all(
        step in (want, _NAME) for want, step in zip(wanted, steps[: len(wanted)], strict=True)
    )

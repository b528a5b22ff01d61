"""The JSON schema of a tool's parameter, from its annotation.

    schema_of(list[int])                        # {"type": "array", "items": {"type": "integer"}}
    schema_of(Literal["km", "miles"])           # {"type": "string", "enum": ["km", "miles"]}
    schema_of(Annotated[int | None, "a page"])  # {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": ...}

The supported types are those that every model family writes as plain JSON; a schema has no references.
"""

import enum
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Union, get_args, get_origin

Schema = dict[str, object]

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
_SUPPORTED = (
    "str, int, float, bool, list[...], dict[str, ...], Literal, an Enum, X | None, Annotated[X, 'a description']"
)


class UnsupportedType(Exception):
    """An annotation that has no schema; the message says which are supported."""


def schema_of(annotation: object) -> Schema:
    """Return the JSON schema of an annotation; UnsupportedType for one that is not in the list above."""
    if isinstance(annotation, type) and annotation in _SCALARS:
        return {"type": _SCALARS[annotation]}
    if annotation is None:
        return {"type": "null"}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _described(arguments)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(argument) for argument in arguments]}
    if origin is Literal:
        return _one_of(arguments, annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _one_of([member.value for member in annotation], annotation)
    if list in (annotation, origin):
        return {"type": "array", "items": schema_of(arguments[0]) if arguments else {}}
    if dict in (annotation, origin) and arguments[:1] in ((), (str,)):
        return {"type": "object", "additionalProperties": schema_of(arguments[1])} if arguments else {"type": "object"}
    raise _unsupported(annotation)


def json_types(schema: Mapping[str, object]) -> set[str]:
    """Return the JSON types that values of a schema may have."""
    alternatives = schema.get("anyOf")
    if isinstance(alternatives, list):
        return set().union(*(json_types(alternative) for alternative in alternatives))
    if isinstance(values := schema.get("enum"), list):
        return {_SCALARS[type(value)] for value in values}
    named = schema["type"]
    return {str(name) for name in named} if isinstance(named, list) else {str(named)}


def _described(arguments: Sequence[object]) -> Schema:
    inner, *notes = arguments
    if len(notes) != 1 or not isinstance(notes[0], str):
        raise UnsupportedType(f"Annotated takes a type and one text, its description; found {notes!r}")
    return {**schema_of(inner), "description": notes[0]}


def _one_of(values: Sequence[object], annotation: object) -> Schema:
    if not values or any(type(value) not in (str, int, bool) for value in values):
        raise _unsupported(annotation)
    kinds = {_SCALARS[type(value)] for value in values}
    return {**({"type": kinds.pop()} if len(kinds) == 1 else {}), "enum": list(values)}


def _unsupported(annotation: object) -> UnsupportedType:
    name = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return UnsupportedType(f"{name} is not supported; use {_SUPPORTED}")

"""The base of every configuration class: strict types, unknown keys refused, immutable."""

import ast
import functools
import inspect
import sys
from collections.abc import Mapping

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

FOR_IDENTITY = {"for_identity": True}
"""Context of a dump that makes a stage's key: without the fields that are marked as `NOT_IDENTITY`."""


def is_none(value: object) -> bool:
    """For `exclude_if`: leaves what is not given out of every dump."""
    return value is None


class _NotIdentity:
    """The class of `NOT_IDENTITY`."""


NOT_IDENTITY = _NotIdentity()
"""Marks a field that changes no result: `Annotated[str, NOT_IDENTITY]`."""


class StrictModel(BaseModel):
    """Configuration is validated once, at load time, and never changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, object]:
        values: dict[str, object] = dump(self)
        if info.context == FOR_IDENTITY:
            unmarked = (name for name, field in type(self).model_fields.items() if NOT_IDENTITY not in field.metadata)
            return {name: values[name] for name in unmarked if name in values}
        return values

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the fields' docstrings as descriptions."""
        reference = handler(schema)
        properties = handler.resolve_ref_schema(reference).get("properties", {})
        for name, text in field_docs(cls).items():
            properties.get(name, {}).setdefault("description", text)
        return reference


@functools.cache
def field_docs(model: type[BaseModel]) -> Mapping[str, str]:
    """What the docstrings below a class's fields say, by the fields' names, those of base classes included.

    Empty for a class that is not at the top level of a module with a source file. Read when somebody asks: pydantic's
    `use_attribute_docstrings` reads every class whenever it is imported, which takes half as long as all the rest.
    """
    found: dict[str, str] = {}
    for part in reversed(model.__mro__):
        found |= _docs_in(part.__module__).get(part.__qualname__, {})
    return {name: found[name] for name in model.model_fields if name in found}


@functools.cache
def _docs_in(module: str) -> dict[str, dict[str, str]]:
    """The docstrings of the fields of a module's classes, by the names of the classes."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # made at run time, or built in
        return {}
    return {part.name: _docs_of(part) for part in ast.parse(source).body if isinstance(part, ast.ClassDef)}


def _docs_of(definition: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }

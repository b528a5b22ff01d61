"""The base of every configuration class: strict types, unknown keys refused, immutable."""

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from luffy.config.field_docs import field_docs

FOR_IDENTITY = {"for_identity": True}
"""Context of a dump that makes a stage's key: fields that change no result leave themselves out of it."""


def is_for_identity(context: object) -> bool:
    """Whether a serializer's `info.context` is `FOR_IDENTITY`."""
    return context == FOR_IDENTITY


def is_none(value: object) -> bool:
    """For `exclude_if`: leaves a section that is not given out of every dump, so that it changes no older key."""
    return value is None


def without_unused(values: dict[str, object], unused: dict[str, object], context: object) -> dict[str, object]:
    """A section's dump; for a stage's key, without those of its fields that have their `unused` value.

    For fields that older runs did not have: while they are not used, the keys of those runs stay.
    """
    if not is_for_identity(context):
        return values
    return {name: value for name, value in values.items() if name not in unused or value != unused[name]}


class StrictModel(BaseModel):
    """Configuration is validated once, at load time, and never changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the fields' docstrings as descriptions."""
        reference = handler(schema)
        properties = handler.resolve_ref_schema(reference).get("properties", {})
        for name, text in field_docs(cls).items():
            properties.get(name, {}).setdefault("description", text)
        return reference

"""The type of a stage's name in a configuration: one of those in the registry (`luffy.config.stage_kinds`)."""

from typing import Annotated

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema


class _Registered:
    """Refuses names without an entry, and lists those with one in the JSON schema."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(_check, core_schema.str_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "enum": list(_names())}


def _check(name: str) -> str:
    if name not in _names():
        quoted = [repr(known) for known in _names()]
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(quoted[:-1])} or {quoted[-1]}"})
    return name


def _names() -> tuple[str, ...]:
    # Imported when it is needed: the settings of a kind may hold an experiment, whose stages are checked here.
    from luffy.config.stage_kinds import STAGE_KINDS

    return tuple(STAGE_KINDS)


StageName = Annotated[str, _Registered()]
"""The name of a kind of stage."""

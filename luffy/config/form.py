"""The experiment as a form: a parameter with the JSON schema of `ExperimentConfig`, whose values count as a file's do.

What is filled in lies over the presets that `chain` and `method` name, as an experiment's YAML does, so a form with the
values of a file is the same experiment, stage by stage. The schema is what a server can check when the form is handed
in; everything else (rules between fields, presets) is checked by `experiment_of_form`, as for a file.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from luffy.config.experiment import ExperimentConfig
from luffy.config.load import PresetKind, available_presets, experiment_of_values, read_overridden
from luffy.config.recipes import RECIPE_KEYS
from luffy.config.shipped import recipe_names

_WHERE = "form"
_PRESETS: dict[str, tuple[PresetKind, str]] = {
    "chain": ("chains", "Which stages are made; `stages`, where given, says it instead."),
    "method": ("methods", "What RL minimises; `objective`, where given, lies over it."),
}
_FILLED_BY_PRESETS = ("sft", "rl", "objective")
_SHORT_FORMS = {
    frozenset({"constant", "linear"}): {"title": "constant", "type": "number"},
    frozenset({"math", "math_strict"}): {"title": "by its name", "type": "string"},
}
"""What stands for one branch of a union with these kinds among others."""


class ExperimentForm(dict[str, Any]):
    """The annotation of such a parameter; the value is the plain mapping."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.dict_schema(keys_schema=core_schema.str_schema())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(ExperimentConfig.__pydantic_core_schema__)
        _Editor(handler).edit(reference)
        _lay_over_presets(handler.resolve_ref_schema(reference), handler)
        return reference


def experiment_of_form(values: dict[str, Any]) -> ExperimentConfig:
    """The experiment; raises ConfigError with one line for each mistake, as for a file.

    An empty section (null) is one that is not given.
    """
    given = {name: value for name, value in values.items() if value is not None}
    return experiment_of_values(json.loads(json.dumps(given)), given_at=_WHERE)  # a copy: recipes are resolved in place


def form_of_file(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a form that is the experiment in `path` with `overrides`; raises ConfigError."""
    values, _ = read_overridden(path, overrides)
    for kind in _PRESETS:
        name = values.get(kind)
        if isinstance(name, str) and name.endswith((".yaml", ".yml")):
            values[kind] = str(path.parent / name)
    return json.loads(json.dumps(values))


class _Editor:
    """Makes pydantic's schema one that forms can show and that takes what a file may say."""

    def __init__(self, handler: GetJsonSchemaHandler) -> None:
        self._handler = handler
        self._seen: set[str] = set()

    def edit(self, schema: Any) -> None:
        """Change `schema`, and all that it refers to, in place."""
        if isinstance(schema, list):
            for part in schema:
                self.edit(part)
        if not isinstance(schema, dict):
            return
        if (reference := schema.get("$ref")) is not None and reference not in self._seen:
            self._seen.add(reference)
            self.edit(self._handler.resolve_ref_schema({"$ref": reference}))
        for name, part in schema.items():
            if name != "default":
                self.edit(part)
        _join_branches(schema)
        for name, part in schema.get("properties", {}).items():
            part.setdefault("title", name.replace("_", " ").capitalize())


def _join_branches(schema: dict[str, Any]) -> None:
    """One flat `anyOf` in place of nested and discriminated unions."""
    if "discriminator" in schema:
        kinds = set(schema.pop("discriminator")["mapping"])
        schema["anyOf"] = schema.pop("oneOf") + [short for known, short in _SHORT_FORMS.items() if known <= kinds]
        if {"hub", "file"} <= kinds:
            schema["anyOf"].append(_recipe())
    if "anyOf" in schema:
        parts = [part["anyOf"] if list(part) == ["anyOf"] else [part] for part in schema["anyOf"]]
        schema["anyOf"] = [branch for part in parts for branch in part]


def _recipe() -> dict[str, Any]:
    properties: dict[str, Any] = {key: {"title": key.replace("_", " ").capitalize()} for key in RECIPE_KEYS}
    properties["kind"] |= {"type": "string", "const": "recipe"}
    properties["name"] |= {"type": "string", "enum": recipe_names()}
    for key in ("path", "file", "author"):
        properties[key] |= {"type": "string"}
    return {
        "title": "Recipe",
        "description": "A source that a YAML file describes (data/recipes/, data/benchmarks/).",
        "type": "object",
        "properties": properties,
        "required": ["kind"],
        "additionalProperties": False,
    }


def _lay_over_presets(schema: dict[str, Any], handler: GetJsonSchemaHandler) -> None:
    """Presets are chosen from a list, and what they say need not be said."""
    schema["required"].remove("stages")
    properties = schema["properties"]
    for key, (kind, description) in _PRESETS.items():
        branches = [{"type": "string", "enum": available_presets(kind)}, {"type": "string", "pattern": r"\.ya?ml$"}]
        properties[key] |= {"anyOf": [*branches, {"type": "null"}], "description": description}
    for section in _FILLED_BY_PRESETS:
        for branch in properties[section]["anyOf"]:
            if "$ref" in branch:
                handler.resolve_ref_schema(branch).pop("required", None)

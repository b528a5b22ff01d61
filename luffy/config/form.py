"""The experiment as a form: a flow parameter with the JSON schema of `ExperimentConfig`, treated like a YAML file.

The values override the presets that `chain` and `method` name, as those of an experiment's YAML do, so a form with the
values of a file is the same experiment, stage by stage. The schema is what a server can check when the form is
submitted; everything else (rules between fields, presets) is checked by `experiment_of_form`, as for a file.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from luffy.config.experiment import ExperimentConfig
from luffy.config.load import RECIPE_KEYS, experiment_of_values, load_experiment, read_overridden
from luffy.config.shipped import PresetKind, available_presets, experiment_file, recipe_names
from luffy.errors import ConfigError

_WHERE = "form"
_PRESETS: dict[str, tuple[PresetKind, str]] = {
    "chain": ("chains", "Which stages are made; `stages` takes precedence."),
    "method": ("methods", "What RL minimises; `objective` overrides its values."),
}
_FILLED_BY_PRESETS = ("sft", "rl", "objective")
_SHORT_FORMS = {
    frozenset({"constant", "linear"}): {"title": "constant", "type": "number"},
    frozenset({"math", "math_strict"}): {"title": "by its name", "type": "string"},
}
"""Schema of the short form of a union that has these kinds among others."""


class ExperimentForm(dict[str, Any]):
    """The annotation of such a parameter; the value is the plain mapping."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.dict_schema(keys_schema=core_schema.str_schema())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(ExperimentConfig.__pydantic_core_schema__)
        for schema_part in _each(reference, handler, set()):
            _make_showable(schema_part)
        _lay_over_presets(handler.resolve_ref_schema(reference), handler)
        return reference


def experiment_of_form(values: dict[str, Any]) -> ExperimentConfig:
    """The experiment; raises ConfigError with one line for each mistake, as for a file.

    What is empty (null) is not given: a section, and what presets may say within `sft`, `rl` and `objective`.
    """
    given = {
        name: _without_nulls(value) if name in _FILLED_BY_PRESETS else value
        for name, value in values.items()
        if value is not None
    }
    return experiment_of_values(json.loads(json.dumps(given)), given_at=_WHERE)  # a copy: recipes are resolved in place


def form_of_file(path: Path | str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The values of a form that is the experiment in `path` with `overrides`.

    Raises ConfigError, also if a form cannot express the file.
    """
    path = experiment_file(path)
    values, _ = read_overridden(path, overrides)
    for kind in _PRESETS:
        name = values.get(kind)
        if isinstance(name, str) and name.endswith((".yaml", ".yml")):
            values[kind] = str(path.parent / name)
    form, asked = json.loads(json.dumps(values)), load_experiment(path, overrides)
    unnamed = dict.fromkeys(_PRESETS)  # a preset beside the file has another path here
    # A chain changed by a method's preset can only be expressed as `stages`.
    for candidate in (form, {**form, "stages": list(asked.stages)}):
        with suppress(ConfigError):
            if experiment_of_form(candidate).model_copy(update=unnamed) == asked.model_copy(update=unnamed):
                return candidate
    raise ConfigError(
        f"{path}: a null in {', '.join(_FILLED_BY_PRESETS)} removes a value of a preset, which a form cannot do; "
        "run the file instead"
    )


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(part) for name, part in value.items() if part is not None}


def _each(schema: Any, handler: GetJsonSchemaHandler, seen: set[str]) -> Iterator[dict[str, Any]]:
    """Every mapping in `schema` and in what it refers to, inner ones first; they may be changed in place."""
    if isinstance(schema, list):
        for part in schema:
            yield from _each(part, handler, seen)
    elif isinstance(schema, dict):
        if (reference := schema.get("$ref")) is not None and reference not in seen:
            seen.add(reference)
            yield from _each(handler.resolve_ref_schema({"$ref": reference}), handler, seen)
        for name, part in schema.items():
            if name != "default":
                yield from _each(part, handler, seen)
        yield schema


def _make_showable(schema: dict[str, Any]) -> None:
    """One flat `anyOf` in place of nested and discriminated unions, which also has their short forms; and titles."""
    if "discriminator" in schema:
        kinds = set(schema.pop("discriminator")["mapping"])
        schema["anyOf"] = schema.pop("oneOf") + [short for known, short in _SHORT_FORMS.items() if known <= kinds]
        if {"hub", "file"} <= kinds:
            schema["anyOf"].append(_recipe())
    if "anyOf" in schema:
        parts = [part["anyOf"] if list(part) == ["anyOf"] else [part] for part in schema["anyOf"]]
        schema["anyOf"] = [branch for part in parts for branch in part]
    for name, part in schema.get("properties", {}).items():
        part.setdefault("title", name.replace("_", " ").capitalize())
        if part.get("type") == "object" and "default" not in part and name not in schema.get("required", []):
            part["default"] = {}  # forms want one where pydantic makes it anew each time


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
    """Offer presets as a list, and make the fields that presets fill optional."""
    schema["required"].remove("stages")
    properties = schema["properties"]
    for key, (kind, description) in _PRESETS.items():
        shipped = {"title": "Preset", "type": "string", "enum": available_presets(kind)}
        branches = [shipped, {"title": "File", "type": "string", "pattern": r"\.ya?ml$"}]
        properties[key] |= {"anyOf": [*branches, {"type": "null"}], "description": description}
    for section in _FILLED_BY_PRESETS:
        for branch in properties[section]["anyOf"]:
            if "$ref" in branch:
                handler.resolve_ref_schema(branch).pop("required", None)
        # A form submits every default in its schema, which would override presets: they move into the descriptions.
        for inner in _each(properties[section]["anyOf"], handler, set()):
            for part in inner.get("properties", {}).values():
                if part.get("default") is not None:
                    default = f"Default: {json.dumps(part.pop('default'))}, unless the method sets it."
                    part["description"] = " ".join(filter(None, [part.get("description"), default]))

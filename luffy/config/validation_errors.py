"""Converts pydantic's validation errors to lines with the place, what was found and what is allowed."""

import functools
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from luffy.config.experiment import ExperimentConfig
from luffy.config.fields import members, models_at, steps, tags
from luffy.config.yaml_source import KeyPath, Value, child, dotted, flow_yaml, nearest, place_of

_PLAIN = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
    "missing": "is missing; add it",
}
_FORMS = {
    r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$": "must be package.module:name",
    r"^(auto|[^\s:/]+:\d+)$": "must be HOST:PORT or auto",
    r"^https?://": "must begin with http:// or https://",
    "^[a-z][a-z0-9_]*$": "may have small letters, digits and _ only, a letter first",
    "^[a-z_][a-z0-9_]*$": "may have small letters, digits and _ only, a letter or _ first",
    "^[a-z0-9][a-z0-9_]*$": "may have small letters, digits and _ only, a letter or digit first",
    "^[a-z0-9][a-z0-9_-]*$": "may have small letters, digits and _ - only, a letter or digit first",
    "^[a-z0-9][a-z0-9_.-]*$": "may have small letters, digits and _ . - only, a letter or digit first",
    "^[A-Za-z0-9][A-Za-z0-9._-]*$": "may have letters, digits and . _ - only, a letter or digit first",
}
_BRANCH = "constrained-"
"""How pydantic calls a branch of a union that is a number or text with limits."""
_NAMED_KEY = re.compile(r"[a-z_][\w.-]*(?=:? )")
"""How most messages of checks over several sections begin: with the key that is wrong."""


def explain(
    error: ValidationError,
    root: type[BaseModel],
    origins: Mapping[KeyPath, str],
    default_where: str,
    values: Value = None,
) -> str:
    """One line for each mistake in `error`, with its file and line from `origins`. `values` are what was validated;
    with them, elements of lists are called by their names."""
    lines = []
    findings = error.errors(include_url=False)
    for finding in findings:
        location = finding["loc"]
        deeper = (other["loc"] for other in findings if len(other["loc"]) > len(location))
        if finding["type"] == "too_short" and any(loc[: len(location)] == location for loc in deeper):
            continue  # pydantic counts valid members only
        path = _key_path(location, root)
        place = path
        if not path and (named := _NAMED_KEY.match(finding["msg"].removeprefix("Value error, "))):
            place = tuple(named[0].split("."))
        if finding["type"] == "union_tag_invalid":
            place = (*place, "kind")
        where = place_of(place, origins, default_where)
        given = functools.reduce(child, path, values)
        lines.append(f"{where}: {_describe(path, dotted(path, values), finding, root, given)}")
    return "\n".join(dict.fromkeys(lines))


def _describe(path: KeyPath, name: str, finding: Mapping[str, Any], root: type[BaseModel], given: Value) -> str:
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == "extra_forbidden":
        return f"{name}: unknown key{_in_place_of(path, root, finding['loc'])}"
    if kind == "union_tag_invalid":
        key = name if isinstance(given, str) else f"{name}.kind"  # a kind may stand for a mapping of it alone
        allowed = re.findall(r"'([^']*)'", context["expected_tags"])
        hint = nearest(context["tag"], allowed, "did you mean {!r}? ", cutoff=0.5)
        return f"{key}: unknown kind {context['tag']!r}; {hint}allowed here: {', '.join(allowed)}"
    if kind == "union_tag_not_found":
        return f"{name}.kind: {_PLAIN['missing']}"
    if kind == "missing":
        preset = ", or chain: NAME, which takes those of a preset" if path == ("stages",) else ""
        return f"{name}: {_PLAIN[kind]}{preset}"
    if kind == "too_short":
        return f"{name}: needs at least {context['min_length']}, found {context['actual_length']}"
    message = _PLAIN.get(kind) or finding["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{name}: {message}" if name else message
    if kind == "string_pattern_mismatch":
        message = _FORMS.get(context["pattern"], message)
    message = (message[0].lower() + message[1:]).replace("input should be", "must be", 1)
    found, hint = finding["input"], ""
    if kind == "literal_error" and isinstance(found, str):
        hint = nearest(found, re.findall(r"'([^']*)'", context["expected"]))
    shown = flow_yaml(found) if found is None or isinstance(found, bool) else repr(found)
    return f"{name}: {message}, found {shown if len(shown) <= 80 else shown[:77] + '...'}{hint}"


def _in_place_of(path: KeyPath, root: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """What is allowed in place of the unknown key at `path`; its `location` also names the kind of its section."""
    models = models_at(path[:-1], root)
    chosen = [model for model in models if location[-2:-1] and location[-2] in tags(model)]
    if chosen and (kinds := [tag for model in models if path[-1] in model.model_fields for tag in tags(model)]):
        return f" of kind {location[-2]}; only kind {' or '.join(map(str, kinds))} has it"
    allowed = sorted(
        {name for model in chosen or models for name in model.model_fields}
        | ({"extends"} if len(path) == 1 and path[0] != "extends" else set())
    )
    if hint := nearest(path[-1], allowed, cutoff=0.65):
        return hint
    name = path[0]
    if len(path) == 1 and name in ExperimentConfig.model_fields and "overrides" in allowed:  # a file of many runs
        if "arms" in allowed and name in ("chain", "method"):
            return f"; each arm has its own: arms.NAME.{name}; a grid has it in its overrides: [{name}=VALUE]"
        override = f"{name}.FIELD=VALUE" if models_at((name,), ExperimentConfig) else f"{name}=VALUE"
        return f"; fields of the experiment go into the list overrides: [{override}]"
    return f"; allowed here: {', '.join(allowed)}" if allowed else ""


def _key_path(location: tuple[int | str, ...], root: type[BaseModel]) -> KeyPath:
    """The path as the user wrote it, without the branches of unions that pydantic adds: tags and types."""
    path: list[str] = []
    annotations: list[Any] = [root]
    for part in location:
        # A tag comes before the model's own keys.
        kinds = {branch: own for annotation in annotations for branch in members(annotation) if (own := tags(branch))}
        tagged = [branch for branch, own in kinds.items() if part in own]
        if tagged and len(kinds) > 1:
            annotations = tagged[:1]
            continue
        is_limited = str(part).startswith(_BRANCH)
        below = [step for annotation in annotations for step in steps(annotation, part)]
        if below and not is_limited:
            path.append(str(part))
            annotations = below
        elif isinstance(part, int) or not (tagged or part in {"int", "float", "str"} or is_limited or "[" in part):
            path.append(str(part))
            annotations = []
    return tuple(path)

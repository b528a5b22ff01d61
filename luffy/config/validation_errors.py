"""Converts pydantic's validation errors to lines with the place, what was found and what is allowed."""

import difflib
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from luffy.config.key_paths import child, dotted
from luffy.config.yaml_source import KeyPath, Value

_PLAIN = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "missing": "is missing; add it",
}
_FORMS = (
    (":", "must be package.module:name"),
    ("^[a-z0-9]", "may have small letters, digits and . _ - only, a letter or digit first"),
    ("^[a-z]", "may have small letters, digits and _ only, a letter first"),
)
"""Parts of patterns of text, and what they ask for."""
_NAMED_KEY = re.compile(r"[a-z_][\w.-]*(?=: )")
"""How the message of a check over several sections begins: with the key that is wrong."""


def explain(
    error: ValidationError,
    root: type[BaseModel],
    origins: Mapping[KeyPath, str],
    default_where: str,
    values: Value = None,
) -> str:
    """One line for each mistake in `error`, with its file and line from `origins`.

    `values` are what was validated; with them, elements of lists are called by their names.
    """
    lines = []
    findings = error.errors(include_url=False)
    for finding in findings:
        if finding["type"] == "too_short" and _has_deeper(finding["loc"], findings):
            continue  # pydantic counts valid members only
        path = _key_path(finding["loc"], root)
        where = _where(path or _named_key(finding), origins, default_where)
        lines.append(f"{where}: {_describe(path, dotted(path, values), finding, root, _at(values, path))}")
    return "\n".join(dict.fromkeys(lines))


def _named_key(finding: Mapping[str, Any]) -> KeyPath:
    found = _NAMED_KEY.match(finding["msg"].removeprefix("Value error, "))
    return tuple(found[0].split(".")) if found else ()


def _has_deeper(location: tuple[int | str, ...], findings: Sequence[Mapping[str, Any]]) -> bool:
    depth = len(location)
    return any(len(other["loc"]) > depth and other["loc"][:depth] == location for other in findings)


def _at(values: Value, path: KeyPath) -> Value:
    for key in path:
        values = child(values, key)
    return values


def _describe(path: KeyPath, name: str, finding: Mapping[str, Any], root: type[BaseModel], given: Value) -> str:
    kind, found = finding["type"], finding["input"]
    if kind == "extra_forbidden":
        return f"{name}: unknown key{_nearest(path, root)}"
    if kind == "union_tag_invalid":
        key = name if isinstance(given, str) else f"{name}.kind"  # a kind may stand for a mapping of it alone
        return f"{key}: {_unknown_kind(finding['ctx'])}"
    if kind == "union_tag_not_found":
        return f"{name}.kind: {_PLAIN['missing']}"
    if kind == "missing":
        return f"{name}: {_PLAIN[kind]}"
    if kind == "too_short":
        return f"{name}: needs at least {finding['ctx']['min_length']}, found {finding['ctx']['actual_length']}"
    message = _PLAIN.get(kind) or _form(finding) or finding["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{name}: {message}" if name else message
    message = message[0].lower() + message[1:]
    return f"{name}: {message}, found {_short(found)}{_nearest_value(finding)}"


def _form(finding: Mapping[str, Any]) -> str | None:
    """What a text should look like; None for a finding of another type."""
    pattern = finding["ctx"]["pattern"] if finding["type"] == "string_pattern_mismatch" else ""
    return next((words for part, words in _FORMS if part in pattern), None)


def _nearest_value(finding: Mapping[str, Any]) -> str:
    if finding["type"] != "literal_error" or not isinstance(finding["input"], str):
        return ""
    allowed = re.findall(r"'([^']*)'", finding["ctx"]["expected"])
    close = difflib.get_close_matches(finding["input"], allowed, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _unknown_kind(context: Mapping[str, Any]) -> str:
    allowed = re.findall(r"'([^']*)'", context["expected_tags"])
    close = difflib.get_close_matches(context["tag"], allowed, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"unknown kind {context['tag']!r}; {hint}allowed here: {', '.join(allowed)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _where(path: KeyPath, origins: Mapping[KeyPath, str], default: str) -> str:
    for end in range(len(path), 0, -1):
        if path[:end] in origins:
            return origins[path[:end]]
    return default


def _nearest(path: KeyPath, root: type[BaseModel]) -> str:
    models = _models_at(path[:-1], root)
    allowed = sorted(
        {name for model in models for name in model.model_fields} | ({"extends"} if len(path) == 1 else set())
    )
    close = difflib.get_close_matches(path[-1], allowed, n=1, cutoff=0.65)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; allowed here: {', '.join(allowed)}" if allowed else ""


def _key_path(location: tuple[int | str, ...], root: type[BaseModel]) -> KeyPath:
    """The path as the user wrote it, without the tags that pydantic adds for branches of unions."""
    path: list[str] = []
    annotations: list[Any] = [root]
    for part in location:
        if (tagged := _tagged(annotations, part)) is not None:
            annotations = [tagged]
            continue
        below = [step for annotation in annotations for step in _step(annotation, part)]
        if below:
            path.append(str(part))
            annotations = below
        elif _is_branch(annotations, part):
            continue
        else:
            path.append(str(part))
            annotations = []
    return tuple(path)


def _tagged(annotations: list[Any], part: int | str) -> type[BaseModel] | None:
    """The model that `part` names among several by its `kind`; pydantic puts this tag before the model's own keys."""
    members = {member: _tags(member) for annotation in annotations for member in _members(annotation)}
    kinds = {member: tags for member, tags in members.items() if tags}
    return next((member for member, tags in kinds.items() if part in tags), None) if len(kinds) > 1 else None


def _tags(member: Any) -> tuple[object, ...]:
    is_model = isinstance(member, type) and issubclass(member, BaseModel)
    return get_args(member.model_fields["kind"].annotation) if is_model and "kind" in member.model_fields else ()


def _is_branch(annotations: list[Any], part: int | str) -> bool:
    """Whether `part` names a branch of a union: a discriminator's tag or the description of a type."""
    if isinstance(part, int):
        return False
    tags = {tag for annotation in annotations for member in _members(annotation) for tag in _tags(member)}
    return part in tags or part in {"int", "float", "str"} or part.startswith("constrained-") or "[" in part


def _models_at(path: KeyPath, root: type[BaseModel]) -> list[type[BaseModel]]:
    annotations: list[Any] = [root]
    for part in path:
        annotations = [step for annotation in annotations for step in _step(annotation, part)]
    members = [member for annotation in annotations for member in _members(annotation)]
    return [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]


def _members(annotation: Any) -> list[Any]:
    """The branches of a union, through `Annotated`; any other annotation is its own only branch."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for branch in get_args(annotation) for member in _members(branch)]
    return [annotation]


def _step(annotation: Any, part: int | str) -> list[Any]:
    """Annotations of the values one key below `annotation`."""
    found = []
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            if part in member.model_fields:
                found.append(member.model_fields[str(part)].annotation)
        elif get_origin(member) is dict and "[" not in str(part):
            found.append(get_args(member)[1])
        elif get_origin(member) is tuple and str(part).isdigit():
            found.append(get_args(member)[0])
    return found

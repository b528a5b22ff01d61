"""Every field of an experiment, by the configuration classes, and the lines that say what is wrong with a value."""

import functools
import itertools
import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python

from luffy.config.chain import StageEntry
from luffy.config.experiment import ExperimentConfig
from luffy.config.foreign_names import SETTING_OF
from luffy.config.removed import removed_field, removed_value
from luffy.config.strict import field_docs
from luffy.config.yaml_source import KeyPath, Value, child, dotted, flow_yaml, nearest, not_among, place_of

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
    found = member.model_fields[_KIND].annotation if is_model(member) and _KIND in member.model_fields else None
    return get_args(found) if get_origin(found) is Literal else ()  # `grading.kind` is a section


def _walk(model: type[BaseModel], prefix: str, above: tuple[type[BaseModel], ...]) -> Iterator[ConfigField]:
    if model in above:
        return
    for name, info in model.model_fields.items():
        if name != _KIND or not tags(model):  # the section's type lists the kinds
            default = info.get_default(call_default_factory=True, validated_data={})
            shown = None if default is PydanticUndefined else json.dumps(to_jsonable_python(default))
            yield ConfigField(model, f"{prefix}{name}", _type_words(info.annotation), shown)
            for below, step in _sections(info.annotation) if model is not StageEntry else ():  # as at the top
                yield from _walk(below, f"{prefix}{name}.{step}", (*above, model))


def _sections(annotation: Any) -> list[tuple[type[BaseModel], str]]:
    """Configuration classes that a value may hold, each with the step to it: "" or `NAME.`."""
    branches = [(branch, "") for branch in members(annotation)]
    branches += [(branch, f"{_NAME}.") for one, _ in branches for below in steps(one, "0") for branch in members(below)]
    return [(branch, step) for branch, step in branches if is_model(branch)]


def _type_words(annotation: Any) -> str:
    words = []
    for branch in members(annotation):
        origin, arguments = get_origin(branch), get_args(branch)
        if origin is Literal:
            words += [value if isinstance(value, str) else json.dumps(value) for value in arguments]
        elif origin is dict:
            words.append(f"mapping of {_type_words(arguments[1])}")
        elif origin is tuple:
            words.append(f"list of {_type_words(arguments[0])}")
        elif is_model(branch):
            words += [f"{_KIND} {kind}" for kind in tags(branch)] or ["section"]
        else:
            words.append(_WORDS.get(branch, "value"))
    return " | ".join(dict.fromkeys(words))


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
_TYPES = {"int", "float", "str", "bool"}
_BRANCH = "constrained-"
"""How pydantic calls a branch of a union that is a number or text with limits."""
_OF_BRANCH = re.compile(r"(?P<place>.*?: must be )(?P<allowed>.*)(?P<found>, found .*)")
_NAMED_KEY = re.compile(r"[a-z_][\w.-]*(?=:? )")
"""How most messages of checks over several sections begin: with the key that is wrong."""


def explain(
    error: ValidationError, root: type[BaseModel], origins: Mapping[KeyPath, str], otherwise: str, values: Value = None
) -> str:
    """One line for each mistake, with file and line from `origins`; with `values`, list elements go by their names."""
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
        where = place_of(place, origins, otherwise)
        given = functools.reduce(child, path, values)
        meant = {"missing": path[:-1], "union_tag_not_found": path}.get(finding["type"], ())
        hint = _other_entry(meant, root, values)
        lines.append(f"{where}: {_describe(path, dotted(path, values), finding, root, given)}{hint}")
    return "\n".join(_branches_together(dict.fromkeys(lines)))


def _other_entry(path: KeyPath, root: type[BaseModel], values: Value) -> str:
    """The earlier entry of a mapping of names that may have been meant by the one at `path`, which is not whole."""
    entries = functools.reduce(child, path[:-1], values)
    if not path or not isinstance(entries, dict) or models_at(path[:-1], root):
        return ""
    return nearest(path[-1], itertools.takewhile(path[-1].__ne__, entries), ", or did you mean {!r}?")


def _branches_together(lines: Iterable[str]) -> list[str]:
    """The lines, where those on a value that suits no branch of a union are one."""
    together: list[str] = []
    for line in lines:
        before, now = _OF_BRANCH.fullmatch(together[-1] if together else ""), _OF_BRANCH.fullmatch(line)
        if before and now and before["place"] == now["place"]:
            found = max(before["found"], now["found"], key=len)  # one may have a hint
            line = f"{before['place']}{before['allowed']} or {now['allowed']}{found}"
            together.pop()
        together.append(line)
    return together


def _describe(path: KeyPath, name: str, finding: Mapping[str, Any], root: type[BaseModel], given: Value) -> str:
    kind, context = finding["type"], finding.get("ctx", {})
    if kind == "extra_forbidden":
        if instead := removed_field(path, *finding["loc"][-2:-1]):  # before the key its section's, or that one's kind
            return f"{name}: is gone; {instead}"
        return f"{name}: unknown key{_in_place_of(path, root, finding['loc'])}"
    if kind == "union_tag_invalid":
        key = name if isinstance(given, str) else f"{name}.kind"  # a kind may stand for a mapping of it alone
        if instead := removed_value(path, context["tag"]) or removed_value((*path, "kind"), context["tag"]):
            return f"{key}: {context['tag']} is gone; {instead}"
        allowed = re.findall(r"'([^']*)'", context["expected_tags"])
        return f"{key}: unknown kind {not_among(context['tag'], allowed)}"
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
        if instead := removed_value(path, found):
            return f"{name}: {found} is gone; {instead}"
        hint = nearest(found, re.findall(r"'([^']*)'", context["expected"]))
    shown = flow_yaml(found) if found is None or isinstance(found, bool) else repr(found)
    return f"{name}: {message}, found {shown if len(shown) <= 80 else shown[:77] + '...'}{hint}"


def _in_place_of(path: KeyPath, root: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """What is allowed in place of the unknown key at `path`; its `location` also names the kind of its section."""
    models = models_at(path[:-1], root)
    chosen = [model for model in models if location[-2:-1] and location[-2] in tags(model)]
    if chosen and (kinds := [tag for model in models if path[-1] in model.model_fields for tag in tags(model)]):
        return f" of kind {location[-2]}; only kind {' or '.join(map(str, kinds))} has it"
    top = {"extends"} if len(path) == 1 and path[0] != "extends" else set()
    allowed = sorted(top.union(*(model.model_fields for model in chosen or models)))
    below = {key: models_at((*path[:-1], key), root) for key in allowed}
    inside = [key for key, found in below.items() if any(path[-1] in each.model_fields for each in found)]
    if inside:
        return f"; did you mean {' or '.join(f'{key}.{path[-1]}' for key in inside)}?"
    if here := SETTING_OF.get(path[-1]):
        return f"; here it is {here}"
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
        elif isinstance(part, int) or not (tagged or part in _TYPES or is_limited or "[" in part):
            path.append(str(part))
            annotations = []
    return tuple(path)

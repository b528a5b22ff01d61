"""Loads an experiment's YAML with `key.path=value` overrides as a validated `ExperimentConfig`.

Later wins: chain preset < method preset < `extends` < the file < further files < the command line. So the values that
an extended file sets itself also hold under another preset. Mappings merge key by key, lists replace, and a mapping
whose `kind` changes replaces the old one. `null` removes a suite, or another entry whose name the user chose. A mapping
with the key `_replace_: true` takes the place of those below it as a whole. A mapping over a list of named elements
changes those that it names, adds others, and removes those that it sets to `null`
(`objective: {terms: {entropy: null, off_policy: {coefficient: 0.5}}}`); an override may name one, too
(`objective.terms.off_policy.coefficient=0.5`), whichever layer the list is from.

Before validation, `{kind: recipe, name: gsm8k}` becomes the source that the recipe describes, with the lines of its
file, a path of data that lies beside the file which names it becomes absolute, and `evaluation.template: PATH` the text
of that file, which so is in the settings and in their identity.
"""

import difflib
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError
from yaml import MarkedYAMLError, YAMLError

from luffy.config.entries import Entry, Layers, with_entries
from luffy.config.evaluation import QUESTION_SLOT, TEMPLATES
from luffy.config.experiment import ExperimentConfig
from luffy.config.fields import explain
from luffy.config.foreign_names import METHOD_OF
from luffy.config.given import STAGES, Given, given
from luffy.config.shipped import (
    EXPERIMENTS,
    PresetKind,
    available_presets,
    expand_pattern,
    experiment_file,
    folder_of_origin,
    named_file,
    recipe_files,
)
from luffy.config.stage_kinds import importing_kinds
from luffy.config.yaml_source import KeyPath, Value, child, flow_yaml, nearest, parse_scalar, place_of, read_yaml
from luffy.errors import ConfigError
from luffy.files import refuse_special
from luffy.json_text import MAX_DEPTH

FileKind = Literal["experiment", "comparison", "grid", "study"]
_KEYS: dict[str, FileKind] = {
    "cells": "study", "arms": "comparison", "grid": "grid", "reference": "comparison", "budget": "comparison",
}  # fmt: skip
"""The first key that a file has tells its kind: a study also has arms, and a study or a comparison may have a grid."""
_NOUNS: dict[FileKind, str] = {"comparison": "a comparison of methods", "grid": "a grid of runs", "study": "a study"}
_COMMAND_LINE = "command line"
_MAX_SHOWN = 60
_FILES = (".yaml", ".yml")
_KEPT = ("author", "max_rows", "only")
"""Values of the experiment that override a recipe."""
_RECIPE_KEYS = ("kind", "name", "path", "file", *_KEPT)
_HUB_ONLY = ("path", "name", "split", "revision")


@dataclass(frozen=True, slots=True)
class ResolvedExperiment:
    """An experiment, and where each of its values was given."""

    config: ExperimentConfig
    given: Mapping[str, Value]
    """All layers merged, without the defaults."""
    origins: Mapping[KeyPath, str]

    def origin_of(self, path: KeyPath) -> str | None:
        """`file:line` or "command line" for the value at `path`; None: it is a default."""
        values: Value = dict(self.given)
        for key in path:
            if isinstance(values, dict) and key not in map(str, values):
                return None
            values = child(values, key)
        return place_of(path, self.origins, "") or None


def load_experiment(
    path: Path | str | Mapping[str, Value], overrides: Sequence[str] = (), *, given_at: str = _COMMAND_LINE
) -> ExperimentConfig:
    """The experiment in the file `path`, or the shipped one of that name, or of these values, with `overrides`
    (`key.path=value`, or a further file, `gpu.yaml`) applied. Raises ConfigError, a line for each mistake: its place
    (`given_at` for overrides), what was found and is allowed."""
    return resolve_experiment(path, overrides, given_at=given_at).config


@importing_kinds()
def resolve_experiment(
    path: Path | str | Mapping[str, Value], overrides: Sequence[str] = (), *, given_at: str = _COMMAND_LINE
) -> ResolvedExperiment:
    """The same, with the origin of every value."""
    if isinstance(path, Mapping):
        file, own = Path(given_at), given(dict(path), {}, given_at)
    else:
        file = experiment_file(path)
        own = _read_with_extends(file, ())
        if (kind := file_kind(own.plain()[0])) != "experiment":
            raise ConfigError(f"{path}: is {_NOUNS[kind]}, not an experiment; run it with: luffy compare {path}")
    files = [text for text in overrides if text.endswith(_FILES) and "=" not in text]
    for further in map(experiment_file, files):
        own = _over(_read_with_extends(further, ()), own)
    overrides = [text for text in overrides if text not in files]
    command_line = _layer(overrides, given_at)
    own = _under(command_line, own)
    chain, method = _presets(own, command_line, file)
    layers = Layers(command_line, own, method, chain)
    values, origins = layers.merged.plain()
    _resolve_files(values, origins, str(file))
    if layers.merged[STAGES].is_list:
        entries = layers.entries(lambda name: _preset("methods", str(name.flat({})), file, name.origin))
        for entry in entries.values():
            _resolve_files(entry.values, entry.origins, str(file))
        for name in (key for key in values if key in entries and key not in ExperimentConfig.model_fields):
            place = max((path for path in origins if path[0] == name), key=len)
            meant = ".".join((STAGES, *place))
            raise ConfigError(f"{origins[place]}: {name}: unknown key; did you mean {meant}?")
        if not (command_line["stages"].value is None and own["stages"].value is None):
            of_chain = Layers(chain=chain).entries()
            added = {"sample", "difficulty"} - of_chain.keys()  # by their sections
            if list(of_chain) != [name for name in entries if name not in added]:  # in place of those of the chain
                at, listed = origins.get(("chain",), ""), (command_line if command_line[STAGES].value else own)[STAGES]
                is_same_place = at.rpartition(":")[0] == listed.origin.rpartition(":")[0]
                if values.pop("chain", None) and listed.is_list and is_same_place:
                    raise ConfigError(f"{listed.origin}: stages: a list takes the place of the chain ({at}); keep one")
        if command_line["method"].value is not None and _have_methods(entries):
            raise ConfigError(
                f"{command_line['method'].origin}: method: {values['method']} has no effect, since each stage that "
                "learns has its own; give stages.NAME.method"
            )
        values, origins = with_entries(values, origins, entries)
    elif STAGES in values:
        where = layers.merged[STAGES].origin
        raise ConfigError(f"{where}: stages: must be a list, found {flow_yaml(values[STAGES])[:_MAX_SHOWN]}")
    try:
        config = ExperimentConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError(explain(error, ExperimentConfig, origins, otherwise=str(file), values=values)) from None
    is_rl_alone = config.method is not None and method.plain()[0].keys() <= {"chain", "objective", "rl"}
    if is_rl_alone and "rl" not in config.kinds:
        top = command_line.over(own)
        method_at, *chain_at = (top[key].origin for key in ("method", "chain", "stages"))
        # What a file inherits, or what an override changes, may have another chain.
        if method_at == given_at or (method_at.startswith(f"{file}:") and given_at not in chain_at):
            raise ConfigError(
                f"{method_at}: method: {config.method} has no effect without the stage rl, and the stages are "
                f"{', '.join(config.stages)}; remove it, or choose a chain with rl (chain=rl)"
            )
        config = config.model_copy(update={"method": None})
    return ResolvedExperiment(config, values, origins)


def read_overridden(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Value], dict[KeyPath, str]]:
    """The mapping in `path` and in what it extends, with `overrides` applied; and the origin of each of its keys."""
    return _layer(overrides, _COMMAND_LINE).over(_read_with_extends(path, ())).plain()


def chain_kinds(chain: str, experiment: Path, where: str) -> tuple[tuple[str, ...], bool, bool]:
    """The kinds of the stages in the preset of a chain, which `where` names; whether it has at most one stage of RL and
    no stage with anything of its own but inputs; and whether each stage that learns names its method. ConfigError if
    there is no such preset."""
    entries = Layers(chain=_preset("chains", chain, experiment, where)).entries()
    kinds = tuple(str(entry.values["kind"]) for entry in entries.values())
    is_plain = all(each.values.keys() <= {"kind", "inputs", "group"} for each in entries.values())
    return kinds, is_plain and kinds.count("rl") < 2, _have_methods(entries)


def _have_methods(entries: Mapping[str, Entry]) -> bool:
    """Whether there are stages that learn, each of which names its method."""
    learning = [entry.values for entry in entries.values() if entry.values["kind"] in ("sft", "rl")]
    return bool(learning) and all("method" in values for values in learning)


def file_kind(values: Mapping[str, Value]) -> FileKind:
    return next((kind for key, kind in _KEYS.items() if key in values), "experiment")


def _presets(own: Given, command_line: Given, path: Path) -> tuple[Given, Given]:
    """A method may name its chain (sft) and a chain its method (sft_then_luffy); what is nearer to the user wins."""
    top = command_line.over(own)
    method = _preset("methods", top.preset_name("method"), path, top["method"].origin)
    layers = (command_line, method, own) if command_line.preset_name("method") else (top, method)
    naming = next((layer for layer in layers if layer.preset_name("chain")), Given({}))
    if naming is method and (named := own.preset_name("chain")):  # over the chain of the file
        asked, at = naming.preset_name("chain"), own["chain"].origin
        stages = chain_kinds(named, path, at)[0]
        if "rl" in stages and "rl" not in chain_kinds(str(asked), path, method["chain"].origin)[0]:
            raise ConfigError(
                f"{top['method'].origin}: method: {top.preset_name('method')} would drop the stage rl of the chain "
                f"{named} ({at}); give its chain, too: chain={asked}"
            )
    chain = _preset("chains", naming.preset_name("chain"), path, naming["chain"].origin)
    if top.preset_name("method") is None and chain.preset_name("method") is not None:
        method = _preset("methods", chain.preset_name("method"), path)
    return chain, method


def _read_with_extends(path: Path, seen: tuple[Path, ...], kind: PresetKind | None = None) -> Given:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(map(str, seen))}; break the circle")
    values, origins = read_yaml(path)
    extends = values.pop("extends", None)
    layer = given(values, origins)
    if extends is None:
        return layer
    where = f"{origins['extends',]}: extends"
    if not isinstance(extends, str):
        raise ConfigError(f"{where}: must be the path of one YAML file, found {extends!r}")
    return _over(layer, _read_with_extends(named_file(extends, path, where, kind), (*seen, path.resolve()), kind))


def _over(nearer: Given, farther: Given) -> Given:
    return nearer.over(_under(nearer, farther))


def _under(nearer: Given, farther: Given) -> Given:
    """The farther layer without the stages that the nearer one's `chain` replaces."""
    is_replaced = nearer["chain"].value is not None and not nearer[STAGES].is_list
    if not is_replaced or not isinstance(farther.value, dict):
        return farther
    return replace(farther, value={key: value for key, value in farther.value.items() if key != STAGES})


def _preset(kind: PresetKind, name: str | None, experiment: Path, where: str = "") -> Given:
    if name is None:
        return Given({})
    names, start = available_presets(kind), folder_of_origin(where)
    is_path = name.endswith((".yaml", ".yml"))
    files = [start / name, experiment.parent / name] if is_path else [EXPERIMENTS / kind / f"{name}.yaml"]
    if file := next((file for file in files if file.is_file()), None):
        return _read_with_extends(file, (), kind)
    if is_path:
        raise ConfigError(
            f"{where or experiment}: {kind.removesuffix('s')}: {name}: no such file; "
            f"{nearest(name, [file.name for file in start.glob('*.y*ml')], 'did you mean {!r}? ')}"
            f"give a path from {start.resolve()}, or a shipped name: {', '.join(names)}"
        )
    if (here := METHOD_OF.get(name.lower().replace("-", "_"))) and kind == "methods":
        raise ConfigError(f"{where or experiment}: no preset {name!r} in exp_configs/{kind}/; here it is {here!r}")
    own = [f"{name}{end}" for end in (".yaml", ".yml") if (start / f"{name}{end}").is_file()]
    raise ConfigError(
        f"{where or experiment}: no preset {name!r} in exp_configs/{kind}/; "
        f"{nearest(name, own or names, 'did you mean {!r}? ', cutoff=0.0 if own else 0.6)}"
        f"there are {', '.join(names)} (or give the path of a .yaml file)"
    )


def parse_overrides(overrides: Sequence[str], origin: str) -> list[tuple[KeyPath, Value]]:
    """The paths and the values, in YAML, of `key.path=value` texts."""
    parsed = list[tuple[KeyPath, Value]]()
    for text in overrides:
        key, separator, value = text.partition("=")
        path = tuple(key.strip().split("."))
        if not separator or not all(path):
            raise ConfigError(f"{origin}: {text!r} is not of the form key.path=value (e.g. rl.steps=50)")
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{origin}: {key[:40]}...: a key of {len(path)} parts; at most {MAX_DEPTH} are read")
        if path == ("extends",):
            raise ConfigError(f"{origin}: extends cannot be overridden; give the other file in place of this one")
        try:
            parsed.append((path, parse_scalar(value)))
        except YAMLError as error:
            reason = f" ({error.problem})" if isinstance(error, MarkedYAMLError) else ""
            shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
            advice = "quote it or close its brackets"
            raise ConfigError(f"{origin}: {key}: {shown!r} is not valid YAML{reason}; {advice}") from None
    return parsed


def _layer(overrides: Sequence[str], origin: str) -> Given:
    layer = Given({})
    for path, value in parse_overrides(overrides, origin):
        one = given(value, {}, origin, path)
        for part in reversed(path):
            one = Given({part: one}, origin)
        layer = one.over(layer)
    return layer


def _at(values: Value, path: KeyPath) -> Value:
    return functools.reduce(child, path, values)


def _section(values: Value, path: KeyPath) -> dict[str, Value]:
    found = _at(values, path)
    return found if isinstance(found, dict) else {}


def _resolve_files(values: dict[str, Value], origins: dict[KeyPath, str], otherwise: str) -> None:
    """Resolve, in place, what stands for a file or its text. A relative path of data that lies in the folder of the
    file which names it becomes whole."""
    resolve_recipes(values, origins, otherwise)
    for path in _sources(values):
        source = _at(values, path)
        text = source.get("path") if isinstance(source, dict) and source.get("kind") == "file" else None
        if not isinstance(text, str) or text.startswith("~"):
            continue
        beside = folder_of_origin(origins.get((*path, "path"))) / text
        if beside.resolve() != Path(text).resolve() and any(file.is_file() for file in expand_pattern(str(beside))):
            _section(values, path[:-1])[path[-1]] = {**_section(values, path), "path": str(beside.resolve())}
    _resolve_template_files(values, origins, otherwise)


def resolve_recipes(values: dict[str, Value], origins: dict[KeyPath, str], otherwise: str) -> None:
    """Replace every recipe among the data sources in place, with its file's lines. ConfigError names the line of an
    unknown key or recipe, or of a `file` that does not fit."""
    for path in _sources(values):
        asked = _at(values, path)
        if not isinstance(asked, dict) or asked.get("kind") != "recipe":
            continue
        where = f"{origins.get(path, otherwise)}: {'.'.join(path)}"
        if unknown := sorted(set(asked) - set(_RECIPE_KEYS)):
            raise ConfigError(f"{where}: unknown key {unknown[0]!r} of a recipe; allowed: {', '.join(_RECIPE_KEYS)}")
        name, file, files = asked.get("name"), asked.get("path"), recipe_files()
        if (name is None) == (file is None):
            raise ConfigError(f"{where}: a recipe needs exactly one of name (a shipped one) and path (a YAML file)")
        if file is not None and not Path(str(file)).is_file():
            raise ConfigError(f"{where}.path: {file}: no such file; relative paths start at {Path.cwd()}")
        if file is None and str(name) not in files:
            close = difflib.get_close_matches(str(name), files, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise ConfigError(f"{where}.name: no recipe {name!r}; {hint}there are {', '.join(files)}")
        recipe, lines = read_yaml(files[str(name)] if file is None else Path(str(file)))
        origins |= {(*path, *key): line for key, line in lines.items()}
        if "file" in asked:  # a local copy of what the recipe would take from the hub
            if recipe.get("kind") not in ("hub", "file"):
                raise ConfigError(f"{where}.file has no effect with a recipe of kind {recipe.get('kind')}; remove it")
            recipe = {key: value for key, value in recipe.items() if key not in _HUB_ONLY}
            recipe |= {"kind": "file", "path": asked["file"]}
            origins[*path, "path"] = origins.get((*path, "file"), otherwise)
        _section(values, path[:-1])[path[-1]] = {**recipe, **{key: asked[key] for key in _KEPT if key in asked}}


def _sources(values: dict[str, Value]) -> list[KeyPath]:
    """Where the sources of data are."""
    parts = ("data", "train", "parts")
    paths: list[KeyPath] = [("data", "train"), ("data", "corpus")]
    paths += [(*parts, name, "source") for name in _section(values, parts)]
    for parent in (("data", "suites"), ("data", "decontamination", "benchmarks")):
        paths += [(*parent, name) for name in _section(values, parent)]
    return paths


def _resolve_template_files(values: dict[str, Value], origins: dict[KeyPath, str], otherwise: str) -> None:
    """Replace every template of `evaluation` that names a file, in place, by the file's text without a last line break.
    ConfigError names the line of a file that cannot be read or lacks the slot of the question."""
    suites = ("evaluation", "suites")
    for path in (("evaluation",), *((*suites, name) for name in _section(values, suites))):
        section = _section(values, path)
        template = section.get("template")
        if not isinstance(template, str) or template in TEMPLATES or QUESTION_SLOT in template or "\n" in template:
            continue
        if "/" not in template and not Path(template).suffix:
            continue
        file, where = Path(template).expanduser(), origins.get((*path, "template"), otherwise)
        place = f"{where}: {'.'.join(path)}.template: {file}"
        try:
            refuse_special(file)
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"{place}: no such file; relative paths start at {Path.cwd()}") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise ConfigError(f"{place}: cannot be read ({reason})") from None
        if (count := text.count(QUESTION_SLOT)) != 1:
            raise ConfigError(f"{place}: must have {QUESTION_SLOT} once, where the question goes; it has {count}")
        section["template"] = text.removesuffix("\n")

"""Loads an experiment's YAML with `key.path=value` overrides as a validated `ExperimentConfig`.

Later wins: chain preset < method preset < `extends` < the file < further files < variables of the environment
(`LUFFY_RL__STEPS=3`) < the command line. So the values that an extended file sets itself also hold under another
preset. Mappings merge key by key, lists replace, and a mapping whose `kind` changes replaces the old one. `null`
removes a suite, or another entry whose name the user chose. A mapping over a list of named elements changes those that
it names, adds others, and removes those that it sets to `null`
(`objective: {terms: {entropy: null, off_policy: {coefficient: 0.5}}}`); an override may name one, too
(`objective.terms.off_policy.coefficient=0.5`), whichever layer the list is from.

Before validation, `{kind: recipe, name: gsm8k}` becomes the source that the recipe describes, with the lines of its
file, a path of data that lies beside the file which names it becomes absolute, and `evaluation.template: PATH` the text
of that file, which so is in the settings and in their identity.
"""

import difflib
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from pydantic import ValidationError
from yaml import MarkedYAMLError, YAMLError

from luffy.config.evaluation import QUESTION_SLOT, TEMPLATES
from luffy.config.experiment import ExperimentConfig
from luffy.config.fields import explain
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
from luffy.config.yaml_source import KeyPath, Value, child, key_paths, nearest, parse_scalar, place_of, read_yaml
from luffy.errors import ConfigError
from luffy.files import refuse_special
from luffy.json_text import MAX_DEPTH

FileKind = Literal["experiment", "comparison", "grid", "study"]
_KEYS: dict[str, FileKind] = {
    "axes": "study",
    "arms": "comparison",
    "grid": "grid",
    "reference": "comparison",
    "budget": "comparison",
}
"""The first key that a file has tells its kind: a study also has arms, and a study or a comparison may have a grid."""
_WORDS: dict[FileKind, tuple[str, str]] = {
    "experiment": ("an experiment", "run"),
    "comparison": ("a comparison of methods", "compare"),
    "grid": ("a grid of runs", "compare"),
    "study": ("a study", "study"),
}
"""The kind as a noun, and the command that runs it."""
_COMMAND_LINE = "command line"
_BY_NAME: tuple[KeyPath, ...] = (
    ("arms",),
    ("grid",),
    ("data", "decontamination", "benchmarks"),
    ("data", "suites"),
    ("data", "train", "parts"),
    ("evaluation", "decodings"),
    ("evaluation", "suites"),
    ("grading", "named"),
)
"""Mappings whose keys the user chooses. `null` for a key that a lower layer has removes its entry."""
_MAX_SHOWN = 60
_FILES = (".yaml", ".yml")
_VARIABLE = "LUFFY_"
_RESEMBLES = 0.75
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


@dataclass(slots=True)
class Layer:
    """A mapping with the origin (`file:line`, or "command line") of each of its keys."""

    values: dict[str, Value] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def over(self, lower: "Layer") -> "Layer":
        """Both merged; the values of this one win."""
        if paths := list(_over_lists(self.values, lower.values)):
            values, named = self.values, list[Override]()
            for path in paths:
                values = _without(values, path)
                for name, value in _section(self.values, path).items():
                    place = (*path, name)
                    lines = {
                        key[len(place) :]: line for key, line in self.origins.items() if key[: len(place)] == place
                    }
                    named.append(Override(place, value, lines.get((), _COMMAND_LINE), lines))
            others = {key: line for key, line in self.origins.items() if not any(key[: len(p)] == p for p in paths)}
            return _with_elements(Layer(values, others).over(lower), named)
        replaced = {path for path in self.origins if not isinstance(_at(self.values, path), dict)}
        kept = {
            path: where
            for path, where in lower.origins.items()
            if not any(path[:depth] in replaced for depth in range(1, len(path)))
        }
        merged = _merge(lower.values, self.values)
        for path in self.origins:
            # The origin stays, so that a layer further below does not bring the entry back.
            if path[:-1] in _BY_NAME and _at(self.values, path) is None and isinstance(_at(lower.values, path), dict):
                merged = _without(merged, path)
        return Layer(merged, {**kept, **self.origins})

    def preset_name(self, key: str) -> str | None:
        """The preset that `key` (`chain` or `method`) names."""
        name = self.values.get(key)
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"{self.origins.get((key,), key)}: {key}: must be a preset's name, found {name!r}")
        return name


@dataclass(frozen=True, slots=True)
class Override:
    """`key.path=value` from the command line, or from a list of overrides elsewhere."""

    path: KeyPath
    value: Value
    origin: str
    lines: Mapping[KeyPath, str] = field(default_factory=dict)
    """Origins of the keys below `path`, where they are not `origin`."""


def load_experiment(
    path: Path | str | Mapping[str, Value], overrides: Sequence[str] = (), *, given_at: str = _COMMAND_LINE
) -> ExperimentConfig:
    """The experiment in the file `path`, or the shipped one of that name, or of these values, with `overrides`
    (`key.path=value`, or a further file, `gpu.yaml`) applied. Raises ConfigError, a line for each mistake: its place
    (`given_at` for overrides), what was found and is allowed."""
    return resolve_experiment(path, overrides, given_at=given_at).config


def resolve_experiment(
    path: Path | str | Mapping[str, Value], overrides: Sequence[str] = (), *, given_at: str = _COMMAND_LINE
) -> ResolvedExperiment:
    """The same, with the origin of every value."""
    if isinstance(path, Mapping):
        file, own = Path(given_at), Layer(dict(path))
    else:
        file = experiment_file(path)
        own = _read_with_extends(file, ())
        refuse_other_kind(own.values, path, "experiment")
    files = [text for text in overrides if text.endswith(_FILES) and "=" not in text]
    for further in map(experiment_file, files):
        own = _read_with_extends(further, ()).over(own)
    overrides = [text for text in overrides if text not in files]
    given = [*environment_overrides(), *parse_overrides(overrides, given_at)]
    nearest_to_user = {override.origin for override in given} | {given_at}
    named, _ = _split_overrides(given, own)
    chain, method = _presets(own, named, file)
    presets = method.over(chain)
    command_line, of_elements = _split_overrides(given, own.over(presets))
    merged = _with_elements(command_line.over(own).over(presets), of_elements)
    resolve_recipes(merged.values, merged.origins, default_where=str(file))
    _resolve_data_files(merged.values, merged.origins)
    _resolve_template_files(merged.values, merged.origins, default_where=str(file))
    try:
        config = ExperimentConfig.model_validate_json(json.dumps(merged.values))
    except ValidationError as error:
        raise ConfigError(
            explain(error, ExperimentConfig, merged.origins, default_where=str(file), values=merged.values)
        ) from None
    is_rl_alone = config.method is not None and method.values.keys() <= {"chain", "objective", "rl"}
    if is_rl_alone and "rl" not in config.stages:
        origins = command_line.over(own).origins
        method_at, *chain_at = (origins.get((key,), "") for key in ("method", "chain", "stages"))
        # What a file inherits, or what an override changes, may have another chain.
        is_changed = not nearest_to_user.isdisjoint(chain_at)
        if method_at in nearest_to_user or (method_at.startswith(f"{file}:") and not is_changed):
            raise ConfigError(
                f"{method_at}: method: {config.method} has no effect without the stage rl, and the stages are "
                f"{', '.join(config.stages)}; remove it, or choose a chain with rl (chain=rl)"
            )
        config = config.model_copy(update={"method": None})
    return ResolvedExperiment(config, merged.values, merged.origins)


def read_overridden(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Value], dict[KeyPath, str]]:
    """The mapping in `path` and in what it extends, with `overrides` applied; and the origin of each of its keys."""
    own = _read_with_extends(path, ())
    command_line, of_elements = _split_overrides(parse_overrides(overrides, _COMMAND_LINE), own)
    layer = _with_elements(command_line.over(own), of_elements)
    return layer.values, layer.origins


def chain_stages(chain: str, experiment: Path, where: str) -> tuple[str, ...]:
    """The stages in the preset of a chain, which `where` names; ConfigError if there is none."""
    stages = _preset("chains", chain, experiment, where).values.get("stages")
    return tuple(map(str, stages)) if isinstance(stages, list) else ()


def file_kind(values: Mapping[str, Value]) -> FileKind:
    return next((kind for key, kind in _KEYS.items() if key in values), "experiment")


def refuse_other_kind(values: Mapping[str, Value], given: Path | str, wanted: FileKind) -> None:
    """Raise ConfigError if the file `given` with these `values` is not of the kind `wanted`."""
    found = file_kind(values)
    is_unfinished = found == "experiment" and "experiment" in values  # names one; the missing keys are reported later
    if found != wanted and not is_unfinished:
        noun, command = _WORDS[found]
        raise ConfigError(f"{given}: is {noun}, not {_WORDS[wanted][0]}; run it with: luffy {command} {given}")


def _presets(own: Layer, command_line: Layer, path: Path) -> tuple[Layer, Layer]:
    """A method may name its chain (sft) and a chain its method (sft_then_luffy); what is nearer to the user wins."""
    top = command_line.over(own)
    method = _preset("methods", top.preset_name("method"), path, top.origins.get(("method",)))
    layers = (command_line, method, own) if command_line.preset_name("method") else (top, method)
    naming = next((layer for layer in layers if layer.preset_name("chain")), Layer())
    chain = _preset("chains", naming.preset_name("chain"), path, naming.origins.get(("chain",)))
    if top.preset_name("method") is None and chain.preset_name("method") is not None:
        method = _preset("methods", chain.preset_name("method"), path)
    return chain, method


def _read_with_extends(path: Path, seen: tuple[Path, ...], kind: PresetKind | None = None) -> Layer:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(map(str, seen))}; break the circle")
    values, origins = read_yaml(path)
    layer, extends = Layer(values, origins), values.pop("extends", None)
    if extends is None:
        return layer
    where = f"{origins['extends',]}: extends"
    if not isinstance(extends, str):
        raise ConfigError(f"{where}: must be the path of one YAML file, found {extends!r}")
    return layer.over(_read_with_extends(named_file(extends, path, where, kind), (*seen, path.resolve()), kind))


def _preset(kind: PresetKind, name: str | None, experiment: Path, where: str | None = None) -> Layer:
    if name is None:
        return Layer()
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
    own = [f"{name}{end}" for end in (".yaml", ".yml") if (start / f"{name}{end}").is_file()]
    raise ConfigError(
        f"{where or experiment}: no preset {name!r} in exp_configs/{kind}/; "
        f"{nearest(name, own or names, 'did you mean {!r}? ', cutoff=0.0 if own else 0.6)}"
        f"there are {', '.join(names)} (or give the path of a .yaml file)"
    )


def environment_overrides() -> list[Override]:
    """What variables override: `LUFFY_SEED=3`, `LUFFY_RL__STEPS=3`, the values in YAML.

    A name without `__` that is no field at the top of an experiment is another program's, unless it resembles one.
    """
    found, fields = list[Override](), ExperimentConfig.model_fields
    for variable in sorted(each for each in os.environ if each.startswith(_VARIABLE)):
        name = variable.removeprefix(_VARIABLE).lower()
        if "__" in name or name in fields:
            found += parse_overrides([f"{name.replace('__', '.')}={os.environ[variable]}"], variable)
        elif hint := nearest(name, fields, "did you mean {}?", cutoff=_RESEMBLES):
            raise ConfigError(f"{variable}: an experiment has no field {name}; {hint}")
    return found


def parse_overrides(overrides: Sequence[str], origin: str) -> list[Override]:
    """Parse `key.path=value` texts, the values in YAML."""
    parsed = []
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
            parsed.append(Override(path, parse_scalar(value), origin))
        except YAMLError as error:
            reason = f" ({error.problem})" if isinstance(error, MarkedYAMLError) else ""
            shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
            raise ConfigError(
                f"{origin}: {key}: {shown!r} is not valid YAML{reason}; quote it or close its brackets"
            ) from None
    return parsed


def _split_overrides(overrides: Iterable[Override], below: Layer) -> tuple[Layer, list[Override]]:
    """One layer of the overrides of mappings, and those of elements of lists, which are applied after the merge."""
    layer, of_elements = Layer(), list[Override]()
    for override in overrides:
        path, value, origin = override.path, override.value, override.origin
        above = [path[:depth] for depth in range(1, len(path) + 1)]
        if any(isinstance(_at(each.values, key), list) for each in (below, layer) for key in above[:-1]):
            of_elements.append(override)
        else:
            layer = Layer(_nested(path, value), dict.fromkeys([*above, *key_paths(value, path)], origin)).over(layer)
    return layer, of_elements


def _with_elements(layer: Layer, overrides: Sequence[Override]) -> Layer:
    """`layer` with elements of its lists changed, added or removed; ConfigError where a list has no such element."""
    for each in overrides:
        values, path = _set(layer.values, each.path, (), each)
        assert isinstance(values, dict)
        origins = dict(layer.origins)
        if each.value is None and isinstance(_at(values, path[:-1]), list):
            origins = _closed_up(origins, path)
        else:
            origins[path] = each.origin
            origins |= dict.fromkeys(key_paths(each.value, path), each.origin)
            origins |= {(*path, *key): line for key, line in each.lines.items()}
        layer = Layer(values, origins)
    return layer


def _over_lists(upper: Mapping[str, Value], lower: Mapping[str, Value], above: KeyPath = ()) -> Iterator[KeyPath]:
    """The paths at which `upper` has a mapping and `lower` a list."""
    if "kind" in upper and "kind" in lower and upper["kind"] != lower["kind"]:
        return
    for key, value in upper.items():
        below = lower.get(key)
        if isinstance(value, dict) and isinstance(below, list):
            yield (*above, key)
        elif isinstance(value, dict) and isinstance(below, dict):
            yield from _over_lists(value, below, (*above, key))


def _closed_up(origins: Mapping[KeyPath, str], removed: KeyPath) -> dict[KeyPath, str]:
    """The origins after the element at `removed` has left its list."""
    depth, index = len(removed), int(removed[-1])
    moved = {}
    for path, line in origins.items():
        if len(path) < depth or path[: depth - 1] != removed[:-1] or int(path[depth - 1]) < index:
            moved[path] = line
        elif int(path[depth - 1]) > index:
            moved[*path[: depth - 1], str(int(path[depth - 1]) - 1), *path[depth:]] = line
    return moved


def _merge(lower: dict[str, Value], upper: dict[str, Value]) -> dict[str, Value]:
    """Mappings merge key by key, lists replace, and a mapping of another `kind` replaces the old one."""
    if "kind" in upper and "kind" in lower and upper["kind"] != lower["kind"]:
        return upper
    merged = dict(lower)
    for key, value in upper.items():
        below = lower.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _without(values: dict[str, Value], path: KeyPath) -> dict[str, Value]:
    """A copy of `values` without the entry at `path`, which need not be there."""
    name, *below = path
    if not below:
        return {key: value for key, value in values.items() if key != name}
    inner = values.get(name)
    return {**values, name: _without(inner, tuple(below))} if isinstance(inner, dict) else values


def _set(value: Value, path: KeyPath, above: KeyPath, override: Override) -> tuple[Value, KeyPath]:
    """`value` with the override merged in at `path`, and the whole path with indices in place of names."""
    at = ".".join(override.path[: len(above)])
    if isinstance(value, list) and path:
        if len(path) == 1 and _is_new(value, path[0], override):
            return [*value, {"name": path[0], **cast("dict[str, Value]", override.value)}], (*above, str(len(value)))
        index = _element_index(value, path[0], f"{override.origin}: {at}")
        if len(path) == 1 and override.value is None:
            return [*value[:index], *value[index + 1 :]], (*above, str(index))
        below, done = _set(value[index], path[1:], (*above, str(index)), override)
        return [*value[:index], below, *value[index + 1 :]], done
    if isinstance(value, dict) and path and isinstance(below := value.get(path[0]), dict | list):
        changed, done = _set(below, path[1:], (*above, path[0]), override)
        return {**value, path[0]: changed}, done
    if isinstance(value, dict):
        new = _nested(path, override.value) if path else override.value
        return (_merge(value, new) if isinstance(new, dict) else new), (*above, *path)
    if path:
        raise ConfigError(f"{override.origin}: {'.'.join(override.path)}: {at} is {value!r}, which has no keys")
    return override.value, above


def _is_new(elements: list[Value], name: str, override: Override) -> bool:
    """Whether an override adds an element of that name to a list of named ones; ConfigError if it is no whole one."""
    named = [element for element in elements if isinstance(element, dict) and "name" in element]
    is_other = len(named) == len(elements) and name not in [element["name"] for element in named]
    if not (is_other and isinstance(override.value, dict)) or name.isdecimal():
        return False
    needed = [key for key in named[0] if all(key in element for element in named)] if named else []
    if missing := [key for key in needed if key not in (*override.value, "name")]:
        names = [str(element["name"]) for element in named]
        hint = nearest(name, names, "did you mean {!r}? ", cutoff=0.5)
        lacking = ", ".join(key + nearest(key, override.value, " in place of {!r}") for key in missing)
        raise ConfigError(
            f"{override.origin}: {'.'.join(override.path)}: no element {name!r} in this list; {hint}there are "
            f"{', '.join(names)}, and a new one also needs {lacking}"
        )
    return True


def _element_index(elements: list[Value], key: str, where: str) -> int:
    """Index of the element that `key` names; ConfigError, which begins with `where`, where there is none."""
    names = [element.get("name") if isinstance(element, dict) else None for element in elements]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(elements):
        return int(key)
    allowed = [str(index) if name is None else str(name) for index, name in enumerate(names)]
    hint = nearest(key, allowed, "did you mean {!r}? ", cutoff=0.5)
    raise ConfigError(f"{where}: no element {key!r} in this list; {hint}there are {', '.join(allowed) or 'none'}")


def _nested(path: KeyPath, value: Value) -> dict[str, Value]:
    for part in reversed(path):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _at(values: Value, path: KeyPath) -> Value:
    return functools.reduce(child, path, values)


def _section(values: Value, path: KeyPath) -> dict[str, Value]:
    found = _at(values, path)
    return found if isinstance(found, dict) else {}


def resolve_recipes(values: dict[str, Value], origins: dict[KeyPath, str], default_where: str) -> None:
    """Replace every recipe among the data sources in place, with its file's lines. ConfigError names the line of an
    unknown key or recipe, or of a `file` that does not fit."""
    for path in _sources(values):
        asked = _at(values, path)
        if not isinstance(asked, dict) or asked.get("kind") != "recipe":
            continue
        where = f"{origins.get(path, default_where)}: {'.'.join(path)}"
        if unknown := sorted(set(asked) - set(_RECIPE_KEYS)):
            raise ConfigError(f"{where}: unknown key {unknown[0]!r} of a recipe; allowed: {', '.join(_RECIPE_KEYS)}")
        recipe, lines = read_yaml(_recipe_file(asked.get("name"), asked.get("path"), where))
        origins |= {(*path, *key): line for key, line in lines.items()}
        if "file" in asked:  # a local copy of what the recipe would take from the hub
            if recipe.get("kind") not in ("hub", "file"):
                raise ConfigError(f"{where}.file has no effect with a recipe of kind {recipe.get('kind')}; remove it")
            recipe = {key: value for key, value in recipe.items() if key not in _HUB_ONLY}
            recipe |= {"kind": "file", "path": asked["file"]}
            origins[*path, "path"] = origins.get((*path, "file"), default_where)
        _section(values, path[:-1])[path[-1]] = {**recipe, **{key: asked[key] for key in _KEPT if key in asked}}


def _sources(values: dict[str, Value]) -> list[KeyPath]:
    """Where the sources of data are."""
    parts = ("data", "train", "parts")
    paths: list[KeyPath] = [("data", "train"), ("data", "corpus")]
    paths += [(*parts, name, "source") for name in _section(values, parts)]
    for parent in (("data", "suites"), ("data", "decontamination", "benchmarks")):
        paths += [(*parent, name) for name in _section(values, parent)]
    return paths


def _resolve_data_files(values: dict[str, Value], origins: Mapping[KeyPath, str]) -> None:
    """Complete, in place, every relative path of data that lies in the folder of the file which names it."""
    for path in _sources(values):
        source = _at(values, path)
        text = source.get("path") if isinstance(source, dict) and source.get("kind") == "file" else None
        if not isinstance(text, str) or text.startswith("~"):
            continue
        beside = folder_of_origin(origins.get((*path, "path"))) / text
        if beside.resolve() != Path(text).resolve() and any(file.is_file() for file in expand_pattern(str(beside))):
            _section(values, path[:-1])[path[-1]] = {**_section(values, path), "path": str(beside.resolve())}


def _recipe_file(name: Value, path: Value, where: str) -> Path:
    if (name is None) == (path is None):
        raise ConfigError(f"{where}: a recipe needs exactly one of name (a shipped one) and path (a YAML file)")
    if path is not None:
        file = Path(str(path))
        if not file.is_file():
            raise ConfigError(f"{where}.path: {path}: no such file; relative paths start at {Path.cwd()}")
        return file
    files = recipe_files()
    if str(name) not in files:
        close = difflib.get_close_matches(str(name), files, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(f"{where}.name: no recipe {name!r}; {hint}there are {', '.join(files)}")
    return files[str(name)]


def _resolve_template_files(values: dict[str, Value], origins: dict[KeyPath, str], default_where: str) -> None:
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
        file, where = Path(template).expanduser(), origins.get((*path, "template"), default_where)
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
            raise ConfigError(
                f"{place}: must have {QUESTION_SLOT} once, where the question goes; it has it {count} times"
            )
        section["template"] = text.removesuffix("\n")

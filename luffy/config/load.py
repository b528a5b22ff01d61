"""Loads an experiment's YAML with `key.path=value` overrides as a validated `ExperimentConfig`.

Later wins: chain preset < method preset < `extends` < the file < the command line. So the values that an extended file
sets itself also hold under another preset. Mappings merge key by key, lists replace, and a mapping whose `kind` changes
replaces the old one. `null` removes a suite, or another entry whose name the user chose. An override may name an
element of a list (`objective.terms.off_policy.coefficient=0.5`), whichever layer the list is from.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from luffy.config.experiment import ExperimentConfig
from luffy.config.file_kind import refuse_other_kind
from luffy.config.key_paths import child, key_paths
from luffy.config.layers import Layer, Override, parse_overrides, split_overrides
from luffy.config.recipes import resolve_recipes
from luffy.config.shipped import (
    PresetKind,
    available_presets,
    experiment_file,
    folder_of_origin,
    named_file,
    nearest,
    preset_file,
)
from luffy.config.template_files import resolve_template_files
from luffy.config.validation_errors import explain
from luffy.config.yaml_source import KeyPath, Value, read_yaml
from luffy.errors import ConfigError

_COMMAND_LINE = "command line"


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
        known = None
        for depth, key in enumerate(path, start=1):
            if isinstance(values, dict) and key not in map(str, values):
                return None
            values = child(values, key)
            known = self.origins.get(path[:depth], known)
        return known


def load_experiment(
    path: Path | str, overrides: Sequence[str] = (), *, given_at: str = _COMMAND_LINE
) -> ExperimentConfig:
    """The experiment in the file `path`, or the shipped one of that name, with `overrides` (`key.path=value`) applied.

    Raises ConfigError with one line for each mistake: where it stands (`given_at` for an override), what was found,
    what is allowed.
    """
    return resolve_experiment(path, overrides, given_at=given_at).config


def resolve_experiment(
    path: Path | str, overrides: Sequence[str] = (), *, given_at: str = _COMMAND_LINE
) -> ResolvedExperiment:
    """The same, with the origin of every value."""
    file = experiment_file(path)
    own = _read_with_extends(file, ())
    refuse_other_kind(own.values, path, "experiment")
    return _resolve(own, parse_overrides(overrides, given_at), file)


def experiment_of_values(values: dict[str, Value], *, given_at: str) -> ExperimentConfig:
    """The experiment that a file with these `values` and without `extends` would describe.

    Paths of presets are relative to the working directory. Raises ConfigError with one line for each mistake; where it
    stands is `given_at`.
    """
    layer = Layer(values, dict.fromkeys(key_paths(values), given_at))
    return _resolve(layer, [], Path(given_at)).config


def _resolve(own: Layer, overrides: Sequence[Override], path: Path) -> ResolvedExperiment:
    named, _ = split_overrides(overrides, own)
    chain, method = _presets(own, named, path)
    presets = method.over(chain)
    command_line, of_elements = split_overrides(overrides, own.over(presets))
    merged = command_line.over(own).over(presets)
    for override in of_elements:
        merged = override.applied_to(merged)
    resolve_recipes(merged.values, merged.origins, default_where=str(path))
    resolve_template_files(merged.values, merged.origins, default_where=str(path))
    try:
        config = ExperimentConfig.model_validate_json(json.dumps(merged.values))
    except ValidationError as error:
        raise ConfigError(
            explain(error, ExperimentConfig, merged.origins, default_where=str(path), values=merged.values)
        ) from None
    if named.preset_name("method") is not None:
        _refuse_unused_method(config, method, named.origins["method",])
    return ResolvedExperiment(config, merged.values, merged.origins)


def _presets(own: Layer, command_line: Layer, path: Path) -> tuple[Layer, Layer]:
    """The presets of chain and method.

    A method may name its chain (sft) and a chain its method (sft_then_luffy); what is named nearer to the user wins.
    """
    top = command_line.over(own)
    method = _preset("methods", top.preset_name("method"), path, top.origins.get(("method",)))
    layers = (command_line, method, own) if command_line.preset_name("method") else (top, method)
    naming = next((layer for layer in layers if layer.preset_name("chain")), Layer())
    chain = _preset("chains", naming.preset_name("chain"), path, naming.origins.get(("chain",)))
    if top.preset_name("method") is None and chain.preset_name("method") is not None:
        method = _preset("methods", chain.preset_name("method"), path)
    return chain, method


def _refuse_unused_method(config: ExperimentConfig, method: Layer, where: str) -> None:
    """A method that an override chooses for RL, in a chain without RL; a file may inherit one and change its chain."""
    if "rl" not in config.stages and method.values.keys() <= {"chain", "objective", "rl"}:
        raise ConfigError(
            f"{where}: method: {config.method} has no effect without the stage rl, and the stages are "
            f"{', '.join(config.stages)}; remove it, or choose a chain with rl (chain=rl)"
        )


def read_overridden(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Value], dict[KeyPath, str]]:
    """The mapping in `path` and in what it extends, with `overrides` applied; and the origin of each of its keys."""
    own = _read_with_extends(path, ())
    command_line, of_elements = split_overrides(parse_overrides(overrides, _COMMAND_LINE), own)
    layer = command_line.over(own)
    for override in of_elements:
        layer = override.applied_to(layer)
    return layer.values, layer.origins


def chain_stages(chain: str, experiment: Path, where: str) -> tuple[str, ...]:
    """The stages in the preset of a chain, which `where` names; ConfigError if there is none."""
    layer = _preset("chains", chain, experiment, where)
    stages = layer.values.get("stages")
    return tuple(map(str, stages)) if isinstance(stages, list) else ()


def _read_with_extends(path: Path, seen: tuple[Path, ...]) -> Layer:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(map(str, seen))}; break the circle")
    values, origins = read_yaml(path)
    extends = values.pop("extends", None)
    layer = Layer(values, origins)
    if extends is None:
        return layer
    if not isinstance(extends, str):
        raise ConfigError(f"{origins['extends',]}: extends: must be the path of one YAML file, found {extends!r}")
    extended = named_file(extends, path, f"{origins['extends',]}: extends")
    return layer.over(_read_with_extends(extended, (*seen, path.resolve())))


def _preset(kind: PresetKind, name: str | None, experiment: Path, where: str | None = None) -> Layer:
    if name is None:
        return Layer()
    names = available_presets(kind)
    if name.endswith((".yaml", ".yml")):
        start = folder_of_origin(where)
        file = next((folder / name for folder in (start, experiment.parent) if (folder / name).is_file()), None)
        if file is None:
            raise ConfigError(
                f"{where or experiment}: {kind.removesuffix('s')}: {name}: no such file; "
                f"give a path from {start.resolve()}, or a shipped name: {', '.join(names)}"
            )
        return _read_with_extends(file, ())
    file = preset_file(kind, name)
    if file is None:
        raise ConfigError(
            f"{where or experiment}: no preset {name!r} in exp_configs/{kind}/;{nearest(name, names)} "
            f"there are {', '.join(names)} (or give the path of a .yaml file)"
        )
    return _read_with_extends(file, ())

"""From an experiment's YAML and `key.path=value` overrides to a validated `ExperimentConfig`.

Later wins: `extends` < chain preset < method preset < the file < the command line. Mappings merge key by key, lists
replace, and a mapping whose `kind` changes replaces the old one.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from luffy.config.complaints import explain
from luffy.config.experiment import ExperimentConfig
from luffy.config.recipes import resolve_recipes
from luffy.config.yaml_source import KeyPath, Value, parse_scalar, read_yaml
from luffy.errors import ConfigError

_SHIPPED = Path(__file__).resolve().parents[2] / "exp_configs"
_COMMAND_LINE = "command line"
PresetKind = Literal["chains", "methods"]


@dataclass(slots=True)
class _Layer:
    """A mapping with the origin of each of its keys."""

    values: dict[str, Value] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def over(self, lower: "_Layer") -> "_Layer":
        replaced = {path for path in self.origins if not isinstance(_lookup(self.values, path), dict)}
        kept = {path: where for path, where in lower.origins.items() if not _is_below(path, replaced)}
        return _Layer(_merge(lower.values, self.values), {**kept, **self.origins})

    def preset_name(self, key: str) -> str | None:
        name = self.values.get(key)
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"{self.origins.get((key,), key)}: {key}: must be a preset's name, found {name!r}")
        return name


def load_experiment(
    path: Path | str, overrides: Sequence[str] = (), *, given_at: str = _COMMAND_LINE
) -> ExperimentConfig:
    """The experiment in `path` with `overrides` (`key.path=value`, the value in YAML) applied.

    Raises ConfigError with one line for each mistake: where it stands (`given_at` for what is overridden), what was
    found, what is allowed.
    """
    path = Path(path)
    return _experiment(_read_with_extends(path, ()), _overrides_layer(overrides, given_at), path)


def experiment_of_values(values: dict[str, Value], *, given_at: str) -> ExperimentConfig:
    """The experiment that a file with these `values` and without `extends` would describe.

    Paths of presets are relative to the working directory. Raises ConfigError with one line for each mistake; where it
    stands is `given_at`.
    """
    layer = _Layer(values, dict.fromkeys(_key_paths(values), given_at))
    return _experiment(layer, _Layer(), Path(given_at))


def _key_paths(value: Value, above: KeyPath = ()) -> Iterator[KeyPath]:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in below:
        yield (*above, str(key))
        yield from _key_paths(part, (*above, str(key)))


def _experiment(own: _Layer, command_line: _Layer, path: Path) -> ExperimentConfig:
    top = command_line.over(own)
    method = _preset("methods", top.preset_name("method"), path)
    # A method may name its chain (sft) and a chain its method (sft_then_luffy); what is named nearer to the user wins.
    nearest = (command_line, method, own) if command_line.preset_name("method") else (top, method)
    chain = _preset("chains", next(filter(None, (layer.preset_name("chain") for layer in nearest)), None), path)
    if top.preset_name("method") is None and chain.preset_name("method") is not None:
        method = _preset("methods", chain.preset_name("method"), path)
    merged = top.over(method.over(chain))
    resolve_recipes(merged.values, merged.origins, default_where=str(path))
    try:
        return ExperimentConfig.model_validate_json(json.dumps(merged.values))
    except ValidationError as error:
        raise ConfigError(explain(error, ExperimentConfig, merged.origins, default_where=str(path))) from None


def read_overridden(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Value], dict[KeyPath, str]]:
    """The mapping in `path`, and in what it extends, under `overrides`; and where each of its keys stands."""
    layer = _overrides_layer(overrides, _COMMAND_LINE).over(_read_with_extends(path, ()))
    return layer.values, layer.origins


def chain_stages(chain: str, experiment: Path) -> tuple[str, ...]:
    """The stages that a chain's preset names (a path stands beside `experiment`); ConfigError where there is none."""
    layer = _preset("chains", chain, experiment)
    stages = layer.values.get("stages")
    return tuple(map(str, stages)) if isinstance(stages, list) else ()


def available_presets(kind: PresetKind) -> list[str]:
    """Names of the shipped presets."""
    return sorted(file.stem for file in (_SHIPPED / kind).glob("*.yaml"))


def _read_with_extends(path: Path, seen: tuple[Path, ...]) -> _Layer:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(map(str, seen))}; break the circle")
    values, origins = read_yaml(path)
    extends = values.pop("extends", None)
    layer = _Layer(values, origins)
    if extends is None:
        return layer
    if not isinstance(extends, str):
        raise ConfigError(f"{origins['extends',]}: extends: must be the path of one YAML file, found {extends!r}")
    return layer.over(_read_with_extends(path.parent / extends, (*seen, path.resolve())))


def _preset(kind: PresetKind, name: str | None, experiment: Path) -> _Layer:
    if name is None:
        return _Layer()
    if name.endswith((".yaml", ".yml")):
        return _read_with_extends(experiment.parent / name, ())
    file = _SHIPPED / kind / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError(
            f"{experiment}: no preset {name!r} in exp_configs/{kind}/; "
            f"there are {', '.join(available_presets(kind))} (or give the path of a .yaml file)"
        )
    return _read_with_extends(file, ())


def _overrides_layer(overrides: Sequence[str], given_at: str) -> _Layer:
    layer = _Layer()
    for text in overrides:
        key, separator, value = text.partition("=")
        path = tuple(key.split("."))
        if not separator or not all(path):
            raise ConfigError(f"{given_at}: {text!r} is not of the form key.path=value (e.g. rl.steps=50)")
        nested: Value = parse_scalar(value)
        for part in reversed(path):
            nested = {part: nested}
        assert isinstance(nested, dict)
        origins = {path[: depth + 1]: given_at for depth in range(len(path))}
        layer = _Layer(nested, origins).over(layer)
    return layer


def _lookup(values: Value, path: KeyPath) -> Value:
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _is_below(path: KeyPath, replaced: set[KeyPath]) -> bool:
    return any(path[:depth] in replaced for depth in range(1, len(path)))


def _merge(lower: dict[str, Value], upper: dict[str, Value]) -> dict[str, Value]:
    if "kind" in upper and "kind" in lower and upper["kind"] != lower["kind"]:
        return upper
    merged = dict(lower)
    for key, value in upper.items():
        below = lower.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged

"""Layers of YAML values that are merged into one configuration, with the origin of every key."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from yaml import MarkedYAMLError, YAMLError

from luffy.config.key_paths import child, element_index, key_paths
from luffy.config.yaml_source import KeyPath, Value, parse_scalar
from luffy.errors import ConfigError
from luffy.json_text import MAX_DEPTH

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
"""Characters of a value that an error shows."""


@dataclass(slots=True)
class Layer:
    """A mapping with the origin (`file:line`, or "command line") of each of its keys."""

    values: dict[str, Value] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def over(self, lower: "Layer") -> "Layer":
        """Both merged; the values of this one win."""
        replaced = {path for path in self.origins if not isinstance(_at(self.values, path), dict)}
        kept = {path: where for path, where in lower.origins.items() if not _is_below(path, replaced)}
        merged = merge(lower.values, self.values)
        for path in self._removed_from(lower):
            merged = _without(merged, path)
        return Layer(merged, {**kept, **self.origins})

    def _removed_from(self, lower: "Layer") -> list[KeyPath]:
        return [
            path
            for path in self.origins
            if path[:-1] in _BY_NAME and _at(self.values, path) is None and isinstance(_at(lower.values, path), dict)
        ]

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

    def leads_into_a_list(self, values: Value) -> bool:
        """Whether a parent of the key is a list in `values`, so that the key addresses one of its elements."""
        for key in self.path[:-1]:
            values = child(values, key)
            if isinstance(values, list):
                return True
        return False

    def as_layer(self) -> Layer:
        above = {self.path[: depth + 1]: self.origin for depth in range(len(self.path))}
        return Layer(_nested(self.path, self.value), {**above, **self._origins_below(self.path)})

    def applied_to(self, layer: Layer) -> Layer:
        """`layer` with the element of the list changed; ConfigError where the list has no such element."""
        values, path = _set(layer.values, self.path, (), self)
        assert isinstance(values, dict)
        return Layer(values, {**layer.origins, path: self.origin, **self._origins_below(path)})

    def _origins_below(self, path: KeyPath) -> dict[KeyPath, str]:
        return dict.fromkeys(key_paths(self.value, path), self.origin)


def parse_overrides(overrides: Sequence[str], origin: str) -> list[Override]:
    """Parse `key.path=value` texts, the values in YAML."""
    return [_parse(text, origin) for text in overrides]


def split_overrides(overrides: Iterable[Override], below: Layer) -> tuple[Layer, list[Override]]:
    """One layer of the overrides of mappings, and those of elements of lists, which are applied after the merge."""
    layer, of_elements = Layer(), list[Override]()
    for override in overrides:
        if override.leads_into_a_list(below.values) or override.leads_into_a_list(layer.values):
            of_elements.append(override)
        else:
            layer = override.as_layer().over(layer)
    return layer, of_elements


def merge(lower: dict[str, Value], upper: dict[str, Value]) -> dict[str, Value]:
    """Mappings merge key by key, lists replace, and a mapping of another `kind` replaces the old one."""
    if "kind" in upper and "kind" in lower and upper["kind"] != lower["kind"]:
        return upper
    merged = dict(lower)
    for key, value in upper.items():
        below = lower.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _parse(text: str, origin: str) -> Override:
    key, separator, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not separator or not all(path):
        raise ConfigError(f"{origin}: {text!r} is not of the form key.path=value (e.g. rl.steps=50)")
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{origin}: {key[:40]}...: a key of {len(path)} parts; at most {MAX_DEPTH} are read")
    if path == ("extends",):
        raise ConfigError(f"{origin}: extends cannot be overridden; give the other file in place of this one")
    try:
        return Override(path, parse_scalar(value), origin)
    except YAMLError as error:
        reason = f" ({error.problem})" if isinstance(error, MarkedYAMLError) else ""
        shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
        raise ConfigError(
            f"{origin}: {key}: {shown!r} is not valid YAML{reason}; quote it or close its brackets"
        ) from None


def _set(value: Value, path: KeyPath, above: KeyPath, override: Override) -> tuple[Value, KeyPath]:
    """`value` with the override merged in at `path`, and the whole path with indices in place of names."""
    if isinstance(value, list) and path:
        where = f"{override.origin}: {'.'.join(override.path[: len(above)])}"
        index = element_index(value, path[0], where)
        below, done = _set(value[index], path[1:], (*above, str(index)), override)
        return [*value[:index], below, *value[index + 1 :]], done
    if isinstance(value, dict) and path and isinstance(below := value.get(path[0]), dict | list):
        changed, done = _set(below, path[1:], (*above, path[0]), override)
        return {**value, path[0]: changed}, done
    if isinstance(value, dict):
        new = _nested(path, override.value) if path else override.value
        return (merge(value, new) if isinstance(new, dict) else new), (*above, *path)
    if path:
        at = ".".join(override.path[: len(above)])
        raise ConfigError(f"{override.origin}: {'.'.join(override.path)}: {at} is {value!r}, which has no keys")
    return override.value, above


def _nested(path: KeyPath, value: Value) -> dict[str, Value]:
    for part in reversed(path):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _without(values: dict[str, Value], path: KeyPath) -> dict[str, Value]:
    """A copy of `values` without the entry at `path`, which need not be there."""
    name, *below = path
    if not below:
        return {key: value for key, value in values.items() if key != name}
    inner = values.get(name)
    return {**values, name: _without(inner, tuple(below))} if isinstance(inner, dict) else values


def _at(values: Value, path: KeyPath) -> Value:
    for part in path:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _is_below(path: KeyPath, replaced: set[KeyPath]) -> bool:
    return any(path[:depth] in replaced for depth in range(1, len(path)))

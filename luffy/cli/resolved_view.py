"""A resolved experiment as YAML, with the origin of each value in a comment."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from luffy.config.load import ResolvedExperiment
from luffy.config.shipped import DATA, EXPERIMENTS, PresetKind
from luffy.config.yaml_source import KeyPath, flow_yaml

_COLUMN = 48
"""Where comments begin, after shorter values."""
_DEFAULT = "default"
_PRESETS = get_args(PresetKind)


def resolved_lines(resolved: ResolvedExperiment, *, defaults: bool = True) -> Iterator[str]:
    """The lines of a YAML file that describes the same experiment, with or without values at their `defaults`."""
    return _Writer(resolved, defaults).mapping(resolved.config.model_dump(mode="json"), ())


class _Writer:
    def __init__(self, resolved: ResolvedExperiment, defaults: bool) -> None:
        self._resolved = resolved
        self._defaults = defaults

    def mapping(self, values: Mapping[str, object], path: KeyPath) -> Iterator[str]:
        """A line for each leaf, under the keys of its sections."""
        for key, value in values.items():
            here = (*path, str(key))
            name = flow_yaml(key)
            if not self._defaults and self._resolved.origin_of(here) is None:
                continue
            if isinstance(value, dict):
                lines = [f"  {line}" for line in self.mapping(value, here)]
                yield from [f"{name}:", *lines] if lines else [self._commented(f"{name}: {{}}", here)]
            elif isinstance(value, list) and any(isinstance(element, dict) for element in value):
                yield f"{name}:"
                yield from (f"  {line}" for line in self._elements(value, here))
            else:
                yield self._commented(f"{name}: {flow_yaml(value)}", here)

    def _elements(self, elements: list[object], path: KeyPath) -> Iterator[str]:
        for index, element in enumerate(elements):
            here = (*path, str(index))
            if not isinstance(element, dict):
                yield self._commented(f"- {flow_yaml(element)}", here)
                continue
            for number, line in enumerate(self.mapping(element, here)):
                yield f"- {line}" if number == 0 else f"  {line}"

    def _commented(self, text: str, path: KeyPath) -> str:
        return f"{text:<{_COLUMN - 2 * (len(path) - 1)}}  # {_words(self._resolved.origin_of(path))}"


def _words(origin: str | None) -> str:
    """`preset methods/luffy.yaml:26`, `exp_configs/smoke.yaml:3`, `my.yaml:12`, `command line`, `default`."""
    if origin is None:
        return _DEFAULT
    path = Path(origin)
    for folder in (EXPERIMENTS, DATA):
        if path.is_relative_to(folder):
            within = path.relative_to(folder)
            return f"preset {within}" if within.parent.name in _PRESETS else str(folder.name / within)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else origin

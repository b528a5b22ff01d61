"""What a YAML file describes: one experiment, or many runs of one (a comparison, a grid, a study)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from luffy.config.yaml_source import Value
from luffy.errors import ConfigError

FileKind = Literal["experiment", "comparison", "grid", "study"]
_KEYS: dict[str, FileKind] = {"axes": "study", "arms": "comparison", "grid": "grid"}
"""The key that only a file of this kind has; a study also has arms, and a study or a comparison may have a grid."""
_WORDS: dict[FileKind, tuple[str, str]] = {
    "experiment": ("an experiment", "run"),
    "comparison": ("a comparison of methods", "compare"),
    "grid": ("a grid of runs", "grid"),
    "study": ("a study", "study"),
}
"""The kind as a noun, and the command that runs it."""


def file_kind(values: Mapping[str, Value]) -> FileKind:
    """The kind of a file with these `values`."""
    return next((kind for key, kind in _KEYS.items() if key in values), "experiment")


def refuse_other_kind(values: Mapping[str, Value], given: Path | str, wanted: FileKind) -> None:
    """Raise ConfigError if the file `given` with these `values` is not of the kind `wanted`."""
    found = file_kind(values)
    is_unfinished = found == "experiment" and "experiment" in values  # names one; the missing keys are reported later
    if found != wanted and not is_unfinished:
        noun, command = _WORDS[found]
        raise ConfigError(f"{given}: is {noun}, not {_WORDS[wanted][0]}; run it with: luffy {command} {given}")

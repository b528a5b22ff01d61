"""The entries of a chain as files and the command line give them, merged with the experiment that they are part of.

A stage's section is what its entry says over what the experiment says, in each layer: chain preset < method preset
(the entry's own, else the experiment's) < files < entry in a file < command line < entry on the command line. So
`rl.steps=5` holds for every stage, and `stages.opd.rl.steps=5` for one. `NAME: {repeat: 3, stages: [...]}` is written
out: its stages get numbers (`sample_1`, `sft_1`, `sample_2`, ...), and an input that names one of them means that of
the same round.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from luffy.config.chain import EVERY_STAGE, SECTIONS, sections_of
from luffy.config.given import STAGES, Given
from luffy.config.stage_kinds import kind_of
from luffy.config.yaml_source import KeyPath, Value, flow_yaml
from luffy.errors import ConfigError

_MOST_ROUNDS = 1000
_WHOLE = ("data", "model", "grading", "environment", *EVERY_STAGE)
"""What an experiment keeps although each stage that reads it has its own."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stage, its sections whole."""

    values: dict[str, Value]
    origins: dict[KeyPath, str]
    reads: tuple[str, ...] = ()
    """The sections that its kind reads."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of an experiment, the nearest to the user first."""

    command_line: Given
    files: Given
    method: Given
    chain: Given

    @property
    def merged(self) -> Given:
        return self._with(self.method)

    def _with(self, method: Given) -> Given:
        return self.command_line.over(self.files.over(method.over(self.chain)))

    def entries(self, preset: Callable[[Given], Given]) -> dict[str, Entry]:
        """The stages by name; `preset`: the method preset that an entry names."""
        found: dict[str, Entry] = {}
        for name, path, number, siblings in written_out(self.merged[STAGES]):
            if name in found:
                raise ConfigError(f"{_at(self.merged, path).origin}: stages: {name} is there twice; rename one of them")
            found[name] = self._entry(path, number, siblings, preset)
        return found

    def _entry(self, path: KeyPath, number: int, siblings: set[str], preset: Callable[[Given], Given]) -> Entry:
        entry = _at(self.merged, path)
        given = entry.value if isinstance(entry.value, dict) else {}
        origins: dict[KeyPath, str] = {(): entry.origin, ("kind",): entry.origin}
        values: dict[str, Value] = {"kind": path[-1]}
        for key, value in given.items():
            if key not in SECTIONS:
                origins[key,] = value.origin
                values[key] = value.flat(origins, (key,))
        if values.get("inputs", {}) is None:  # taken back
            del values["inputs"]
        inputs = values.get("inputs")
        if number and isinstance(inputs, dict):
            values["inputs"] = {key: f"{each}_{number}" if each in siblings else each for key, each in inputs.items()}
        try:
            reads = sections_of(kind_of(str(values["kind"])))
        except ValueError:  # which the validation says
            reads = SECTIONS
        own, method = {*given} & {*SECTIONS}, self.method
        if unread := next((key for key in given if key in own and key not in (*reads, *EVERY_STAGE)), None):
            raise ConfigError(
                f"{given[unread].origin}: {'.'.join((*path, unread))}: a stage of kind {values['kind']} does not read "
                f"it; it reads {', '.join((*reads, *EVERY_STAGE))}; remove it"
            )
        if "method" in given:
            method = preset(given["method"])
            own |= {key for layer in (method, self.method) for key in layer.value or () if key in reads}  # type: ignore[union-attr]
        if own:
            replaced = self.command_line[STAGES].is_list
            in_files = Given({}) if replaced else _sections(_at(self.files.over(self.chain), path))
            on_command_line = _sections(_at(self.command_line, path))
            seen = on_command_line.over(self.command_line).over(in_files.over(self.files.over(method.over(self.chain))))
            for key in (key for key in SECTIONS if key in own):
                origins[key,] = seen[key].origin
                values[key] = seen[key].flat(origins, (key,))
        return Entry(values, origins, reads)


def with_entries(
    values: dict[str, Value], origins: dict[KeyPath, str], entries: dict[str, Entry]
) -> tuple[dict[str, Value], dict[KeyPath, str]]:
    """An experiment's values and origins with these stages. A section that each stage which reads it has for itself is
    left out of the experiment: it need not be whole."""
    unused = {
        section
        for section in SECTIONS
        if section not in _WHOLE
        and (readers := [entry for entry in entries.values() if section in entry.reads])
        and all(section in entry.values for entry in readers)
    }
    entries = _with_those_of_sections(values, origins, entries)
    kept = {key: value for key, value in values.items() if key not in unused}
    where = {path: origin for path, origin in origins.items() if path[:1] != (STAGES,) or path == (STAGES,)}
    for name, entry in entries.items():
        where |= {(STAGES, name, *path): origin for path, origin in entry.origins.items()}
    return kept | {STAGES: {name: entry.values for name, entry in entries.items()}}, where


def _with_those_of_sections(
    values: dict[str, Value], origins: dict[KeyPath, str], entries: dict[str, Entry]
) -> dict[str, Entry]:
    """The stages `sample` and `difficulty` behind the base, where teachers or `difficulty` are given and no entry
    places them."""
    kinds = {entry.values["kind"]: name for name, entry in entries.items()}
    sample = values.get("sample")
    is_taught = isinstance(sample, dict) and bool(sample.get("teachers")) and bool({"sft", "rl"} & {*kinds})
    wanted = {"sample": is_taught, "difficulty": values.get("difficulty") is not None and "rl" in kinds}
    names, after = list(entries), "base"
    for kind in (kind for kind, is_wanted in wanted.items() if is_wanted and after in names):
        if kind not in kinds:
            names.insert(names.index(after) + 1, kind)
        after = kinds.get(kind, kind)
    places: tuple[KeyPath, ...] = (), ("kind",)
    added = {name: dict.fromkeys(places, origins.get((name,), "")) for name in names if name not in entries}
    return {name: entries.get(name) or Entry({"kind": name}, added[name]) for name in names}


def written_out(stages: Given) -> Iterator[tuple[str, KeyPath, int, set[str]]]:
    """Each stage: its name, the path of its entry, its round (0 outside of rounds) and the names in its group."""
    for name, entry in stages.value.items() if isinstance(stages.value, dict) else ():
        path = (STAGES, name)
        if entry[STAGES].value is None and "repeat" not in (entry.value if isinstance(entry.value, dict) else {}):
            yield name, path, 0, set()
            continue
        inner, times = entry[STAGES], entry["repeat"]
        if unknown := [key for key in entry.value or () if key not in (STAGES, "repeat")]:  # type: ignore[union-attr]
            raise ConfigError(
                f"{entry[unknown[0]].origin}: {'.'.join(path)}.{unknown[0]}: a group of stages has repeat and stages "
                "alone; give it to the stages"
            )
        if not inner.is_list or not isinstance(inner.value, dict):
            raise ConfigError(f"{entry.origin}: {'.'.join(path)}.stages: must be a list of the stages to repeat")
        if not isinstance(times.value, int) or isinstance(times.value, bool) or not 1 <= times.value <= _MOST_ROUNDS:
            raise ConfigError(
                f"{times.origin or entry.origin}: {'.'.join(path)}.repeat: must be a whole number from 1 to "
                f"{_MOST_ROUNDS}, found {flow_yaml(times.flat({}))}"
            )
        for within, each in inner.value.items():
            if each[STAGES].value is not None:
                raise ConfigError(f"{each.origin}: {'.'.join(path)}.{within}: a group within a group; write it out")
        for number in range(1, times.value + 1):
            for within in inner.value:
                yield f"{within}_{number}", (*path, STAGES, within), number, {*inner.value}


def _at(value: Given, path: KeyPath) -> Given:
    for key in path:
        value = value[key]
    return value


def _sections(entry: Given) -> Given:
    values = entry.value if isinstance(entry.value, dict) else {}
    return Given({key: value for key, value in values.items() if key in SECTIONS}, entry.origin)

"""The entries of a chain as files and the command line give them, merged with the experiment that they are part of.

A stage's section is what its entry says over what the experiment says, in each layer: chain preset < method preset
(the entry's own, else the experiment's) < files < entry in a file < command line < entry on the command line. So
`rl.steps=5` holds for every stage, and `stages.opd.rl.steps=5` for one. `NAME: {repeat: 3, stages: [...]}` is written
out: its stages get numbers (`sample_1`, `sft_1`, `sample_2`, ...), and an input that names one of them means that of
the same round.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from luffy.config.chain import EVERY_STAGE, SECTIONS, sections_of
from luffy.config.given import STAGES, Given
from luffy.config.stage_kinds import kind_of
from luffy.config.yaml_source import KeyPath, Value, flow_yaml
from luffy.errors import ConfigError

_NOTHING = Given({})
_MOST_ROUNDS = 1000
_MAY_LACK = ("environment",)
"""Sections of a stage that may be null: it then has none."""
_WHOLE = ("data", "model", "base", "evaluation", "grading", "environment", *EVERY_STAGE)
"""What an experiment keeps although each stage that reads it has its own."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One stage, its sections whole."""

    values: dict[str, Value]
    origins: dict[KeyPath, str]
    reads: tuple[str, ...] = ()
    """The sections that its kind reads."""


@dataclass(frozen=True)
class Layers:
    """The layers of an experiment, the nearest to the user first."""

    command_line: Given = _NOTHING
    files: Given = _NOTHING
    method: Given = _NOTHING
    chain: Given = _NOTHING

    @cached_property
    def merged(self) -> Given:
        return self.command_line.over(self.files.over(self.method.over(self.chain)))

    def entries(self, preset: Callable[[Given], Given] = lambda name: _NOTHING) -> dict[str, Entry]:
        """The stages by name; `preset`: the method preset that an entry names, by default nothing."""
        found: dict[str, Entry] = {}
        for name, path, number, siblings in written_out(self.merged[STAGES]):
            if name in found:
                raise ConfigError(f"{_at(self.merged, path).origin}: stages: {name} is there twice; rename one of them")
            found[name] = self._entry(path, number, siblings, preset)
        return found

    def _entry(self, path: KeyPath, number: int, siblings: set[str], preset: Callable[[Given], Given]) -> Entry:
        entry = _at(self.merged, path)
        given = _given(entry)
        origins: dict[KeyPath, str] = {(): entry.origin, ("kind",): entry.origin}
        values: dict[str, Value] = {"kind": path[-1]}
        if number:
            values["group"] = path[1]
        where = ".".join(path)
        if not isinstance(kind_name := given["kind"].value if "kind" in given else path[-1], str):
            raise ConfigError(f"{given['kind'].origin}: {where}.kind: must be the name of a kind of stage")
        for key, value in given.items():
            if key not in SECTIONS:
                origins[key,] = value.origin
                values[key] = value.flat(origins, (key,))
        if isinstance(inputs := values.get("inputs"), dict):
            there = {key: each for key, each in inputs.items() if each is not None}
            values["inputs"] = {key: _of_round(each, number, siblings) for key, each in there.items()}
        try:
            reads = sections_of(kind_of(kind_name))
        except ValueError:  # which the validation says
            reads = SECTIONS
        own, method = {*given} & {*SECTIONS}, self.method
        if unread := next((key for key in given if key in own and key not in (*reads, *EVERY_STAGE)), None):
            why = f"a stage of kind {values['kind']} does not read it; it reads {', '.join((*reads, *EVERY_STAGE))}"
            raise ConfigError(f"{given[unread].origin}: {where}.{unread}: {why}; remove it")
        if "method" in given:
            method = preset(given["method"])
            if _keys(method) and not any(key in reads for key in _keys(method)):
                nothing = f"{flow_yaml(given['method'].flat({}))} has nothing for a stage of kind {kind_name}"
                raise ConfigError(f"{given['method'].origin}: {where}.method: {nothing}; remove it")
            own |= {key for layer in (method, self.method) for key in _keys(layer) if key in reads}
        if own:
            replaced = self.command_line[STAGES].is_list
            in_files = _NOTHING if replaced else _sections(_at(self.files.over(self.chain), path))
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
    entries = _with_those_of_sections(values, origins, entries)
    unused = {
        section
        for section in SECTIONS
        if section not in _WHOLE
        and (readers := [entry for entry in entries.values() if section in entry.reads])
        and all(section in entry.values for entry in readers)
    }
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
    kinds = {str(entry.values["kind"]): name for name, entry in entries.items()}
    sample = values.get("sample")
    is_taught = isinstance(sample, dict) and bool(sample.get("teachers")) and bool({"sft", "rl"} & {*kinds})
    wanted = {"sample": is_taught, "difficulty": values.get("difficulty") is not None and "rl" in kinds}
    names, after = list(entries), kinds.get("base", "")
    for kind in (kind for kind, is_wanted in wanted.items() if is_wanted and after in names):
        if kind not in kinds:
            if kind in names:
                what = "adds a stage of that name, which another one has; rename that"
                raise ConfigError(f"{origins.get((kind,), '')}: {kind}: {what}")
            names.insert(names.index(after) + 1, kind)
        after = kinds.get(kind, kind)
    places: tuple[KeyPath, ...] = (), ("kind",)
    added = {name: dict.fromkeys(places, origins.get((name,), "")) for name in names if name not in entries}
    return {name: entries.get(name) or Entry({"kind": name}, added[name], sections_of(kind_of(name))) for name in names}


def written_out(stages: Given) -> Iterator[tuple[str, KeyPath, int, set[str]]]:
    """Each stage: its name, the path of its entry, its round (0 outside of rounds) and the names in its group."""
    for name, entry in stages.value.items() if isinstance(stages.value, dict) else ():
        path, where = (STAGES, name), f"{STAGES}.{name}"
        if not isinstance(entry.value, dict):
            found = flow_yaml(entry.flat({}))
            raise ConfigError(f"{entry.origin}: {where}: must be a mapping of what is the stage's own, found {found}")
        if entry[STAGES].value is None and "repeat" not in entry.value:
            yield name, path, 0, set()
            continue
        inner, times = entry[STAGES], entry["repeat"]
        if unknown := next((key for key in entry.value if key not in (STAGES, "repeat")), None):
            what = "a group of stages has repeat and stages alone; give it to the stages"
            raise ConfigError(f"{entry[unknown].origin}: {where}.{unknown}: {what}")
        if not inner.is_list or not isinstance(inner.value, dict) or not inner.value:
            raise ConfigError(f"{entry.origin}: {where}.stages: must be a list of the stages to repeat")
        if not isinstance(times.value, int) or isinstance(times.value, bool) or not 1 <= times.value <= _MOST_ROUNDS:
            found = f"must be a whole number from 1 to {_MOST_ROUNDS}, found {flow_yaml(times.flat({}))}"
            raise ConfigError(f"{times.origin or entry.origin}: {where}.repeat: {found}")
        for within, each in inner.value.items():
            if not isinstance(each.value, dict):
                raise ConfigError(f"{each.origin}: {where}.stages.{within}: must be a mapping")
            if each[STAGES].value is not None:
                raise ConfigError(f"{each.origin}: {where}.{within}: a group within a group; write it out")
        for number in range(1, times.value + 1):
            for within in inner.value:
                yield f"{within}_{number}", (*path, STAGES, within), number, {*inner.value}


def _at(value: Given, path: KeyPath) -> Given:
    for key in path:
        value = value[key]
    return value


def _keys(value: Given) -> dict[str, Given]:
    return value.value if isinstance(value.value, dict) else {}


def _given(entry: Given) -> dict[str, Given]:
    """What an entry has. A null takes back what a farther layer gives: the stage has the experiment's."""
    return {key: value for key, value in _keys(entry).items() if value.value is not None or key in _MAY_LACK}


def _sections(entry: Given) -> Given:
    return Given({key: value for key, value in _given(entry).items() if key in SECTIONS}, entry.origin)


def _of_round(source: Value, number: int, siblings: set[str]) -> Value:
    """The stages that an input names: one of the same group is that of the same round."""
    if isinstance(source, list):
        return [_of_round(each, number, siblings) for each in source]
    return f"{source}_{number}" if number and isinstance(source, str) and source in siblings else source

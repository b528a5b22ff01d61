"""Values of an experiment as given in one layer, with their origins, and how layers merge."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from luffy.config.yaml_source import KeyPath, Value, flow_yaml, nearest, not_among
from luffy.errors import ConfigError

_BY_NAME: tuple[KeyPath, ...] = (
    ("arms",),
    ("grid",),
    ("data", "decontamination", "benchmarks"),
    ("data", "suites"),
    ("data", "train", "parts"),
    ("evaluation", "decodings"),
    ("evaluation", "suites"),
    ("grading", "named"),
    ("rl", "teachers"),
)
"""Mappings whose keys the user chooses. `null` for a key that a lower layer has removes its entry."""
_REPLACE = "_replace_"
STAGES = "stages"
"""The list of an experiment whose elements are stages, by their names; groups of repeated stages hold such lists."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value of a layer, and where it was given (`file:line`, or "command line"). The elements of a list go by their
    names where all have one, else by their numbers."""

    value: "bool | int | float | str | dict[str, Given] | None"
    origin: str = ""
    is_list: bool = False
    keeps_names: bool = False
    """A list whose elements stay under their names when it is made plain: the stages of a chain."""
    replaces: bool = False
    """A mapping that merges with none below it."""
    is_removed: bool = False
    """A `null` that has removed an entry: it stays, so that a layer further below does not bring the entry back."""

    def __getitem__(self, key: str) -> "Given":
        """What is below a key; a null without an origin where there is nothing."""
        return self.value.get(key, Given(None)) if isinstance(self.value, dict) else Given(None)

    def over(self, lower: "Given", path: KeyPath = (), *, merges: bool = True) -> "Given":
        """Both merged: mappings key by key, lists replace, and a mapping of another `kind` replaces the old one
        (`merges`: none has been replaced above). A mapping changes, adds and removes elements of a list."""
        own, below = self.value, lower.value
        if self.is_list or self.replaces or not isinstance(own, dict) or not isinstance(below, dict):
            return self
        merges = merges and not ("kind" in own and "kind" in below and self["kind"].value != lower["kind"].value)
        if lower.is_list and not merges:
            return self
        found = dict(below) if merges else {}
        for key, part in own.items():
            if lower.is_list:
                key, part = _element(lower, key, part, path)
            known = below.get(key)
            if known is None:
                found[key] = part
            elif part.value is None and lower.is_list:
                del found[key]
            elif part.value is None and _of_stage(path) in _BY_NAME and isinstance(known.value, dict):
                found[key] = replace(part, is_removed=True)
            else:
                found[key] = part.over(known, (*path, key), merges=merges)
        return Given(found, self.origin, lower.is_list, lower.keeps_names, lower.replaces)

    def flat(self, origins: dict[KeyPath, str], path: KeyPath = ()) -> Value:
        """The plain value; `origins` gets those of its parts."""
        if not isinstance(self.value, dict):
            return self.value
        found: dict[str, Value] = {}
        is_list = self.is_list and not self.keeps_names
        for key, part in self.value.items():
            if not part.is_removed:
                name = str(len(found)) if is_list else key
                origins[*path, name] = part.origin
                found[name] = part.flat(origins, (*path, name))
        return list(found.values()) if is_list else found

    def plain(self) -> tuple[dict[str, Value], dict[KeyPath, str]]:
        """All values, and where each was given."""
        origins: dict[KeyPath, str] = {}
        values = self.flat(origins)
        assert isinstance(values, dict)
        return values, origins

    def preset_name(self, key: str) -> str | None:
        """The preset that `key` (`chain` or `method`) names."""
        name = self[key].flat({})
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"{self[key].origin}: {key}: must be a preset's name, found {name!r}")
        return name


def given(value: Value, origins: Mapping[KeyPath, str], otherwise: str = "", path: KeyPath = ()) -> Given:
    """`value` with its `origins`; what has none was given at `otherwise`."""
    origin, names = origins.get(path, otherwise), list[str]()
    if isinstance(value, list) and path[:1] == path[-1:] == (STAGES,):
        return _stages(value, origins, otherwise, path)
    if isinstance(value, list):
        names = [str(each["name"]) for each in value if isinstance(each, dict) and "name" in each]
        if not len({*names}) == len(names) == len(value):
            names = [str(index) for index in range(len(value))]
        parts = [given(part, origins, otherwise, (*path, str(index))) for index, part in enumerate(value)]
        return Given(dict(zip(names, parts, strict=True)), origin, is_list=True)
    if isinstance(value, dict):
        if value.get(_REPLACE, True) is not True:
            raise ConfigError(f"{origin or otherwise}: {'.'.join((*path, _REPLACE))}: must be true, or left out")
        parts_of = {str(key): part for key, part in value.items() if key != _REPLACE}
        below = {key: given(part, origins, otherwise, (*path, key)) for key, part in parts_of.items()}
        return Given(below, origin, replaces=_REPLACE in value)
    return Given(value, origin)


def _stages(values: list[Value], origins: Mapping[KeyPath, str], otherwise: str, path: KeyPath) -> Given:
    """The entries of a chain, `rl` or `{opd: {kind: rl, ...}}`, by their names."""
    found: dict[str, Given] = {}
    for index, value in enumerate(values):
        here = (*path, str(index))
        where = origins.get(here, otherwise)
        entry = {value: None} if isinstance(value, str) else value
        name, own = next(iter(entry.items()), ("", None)) if isinstance(entry, dict) else ("", None)
        if not isinstance(entry, dict) or len(entry) != 1 or not isinstance(own, dict | None):
            must = f"{'.'.join(here)}: must be a kind of stage, or NAME: {{kind: KIND, ...}} with what is its own"
            raise ConfigError(f"{where}: {must}, found {flow_yaml(value)}")
        if name in found:
            advice = f"give this one a name of its own: {name}_2: {{kind: {name}}}"
            raise ConfigError(f"{where}: {'.'.join(path)}: {name} is there twice; {advice}")
        found[name] = given(own or {}, origins, where, (*here, name))
    return Given(found, origins.get(path, otherwise), is_list=True, keeps_names=True)


def _of_stage(path: KeyPath) -> KeyPath:
    """The path in a stage's own values, if it leads through one."""
    while path[:1] == (STAGES,):
        path = path[2:]
    return path


def _element(elements: Given, key: str, part: Given, path: KeyPath) -> tuple[str, Given]:
    """The name of the element of a list that `key` means, and what it gets; ConfigError where there is no such element,
    or where a new one is not whole."""
    known, where, needs = elements.value, f"{part.origin}: {'.'.join(path)}", ""
    assert isinstance(known, dict)
    names = list(known)
    if key not in known and key.isdecimal() and int(key) < len(names):
        key = names[int(key)]
    if key in known:
        if isinstance(part.value, dict) and not isinstance(known[key].value, dict):
            raise ConfigError(f"{where}.{key} is {known[key].value!r}, which has no keys")
        return key, part
    is_new = isinstance(part.value, dict) and not key.isdecimal() and not elements.keeps_names
    if is_new and isinstance(part.value, dict) and all(each["name"].origin for each in known.values()):
        fields = [each.value for each in known.values() if isinstance(each.value, dict)]
        shared = [field for field in (fields[0] if fields else ()) if all(field in each for each in fields)]
        missing = [field for field in shared if field not in (*part.value, "name")]
        if not missing:
            return key, replace(part, value={"name": Given(key, part.origin), **part.value})
        lacking = (field + nearest(field, part.value, " in place of {!r}") for field in missing)
        needs = f", and a new one also needs {', '.join(lacking)}"
    raise ConfigError(f"{where}: no element {not_among(key, names)}{needs}")

"""Strict reading of a YAML file (no duplicate keys, `1e-4` is a number, the line of every key is kept), and writing.

Paths of keys, such as `("objective", "terms", "1")`, are written `objective.terms.off_policy`: an element of a list of
mappings goes by its `name`; one without a name goes by its index.
"""

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping
from math import inf
from pathlib import Path
from typing import Any, cast

import yaml

from luffy.errors import ConfigError
from luffy.json_text import MAX_DEPTH

try:
    from yaml import CSafeLoader as _FastSafeLoader
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeLoader as _FastSafeLoader  # type: ignore[assignment]

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]
KeyPath = tuple[str, ...]
_MAX_NODES = 200_000
"""Values of a file with every alias (`*name`) written out: nine lines of aliases can expand to a billion values."""
_MAX_BYTES = 1 << 24  # a device may have no end
_TOO_DEEP = f"nested too deep, at most {MAX_DEPTH} levels are read"


class _Keys:
    """A loader's keys as in YAML 1.2: PyYAML alone reads the key `on` as true."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)  # type: ignore[misc]

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)  # type: ignore[misc]
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise yaml.constructor.ConstructorError(None, None, "half a character (a lone surrogate)", node.start_mark)
        return text


class _Loader(_Keys, _FastSafeLoader):
    """Loader with YAML 1.2 floats and keys, by libyaml, which is several times as fast as PyYAML's own parser."""


class _ExplainingLoader(_Keys, yaml.SafeLoader):
    """The same by PyYAML's own parser, whose errors say more: which character, and on which line."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text which `_Loader` would take for a number, such as the hash `0990e206`."""


_NOT_IN_JSON = tuple(f"tag:yaml.org,2002:{name}" for name in ("binary", "omap", "pairs", "set", "timestamp"))
"""Tags of YAML 1.1 for values that no setting has."""


_NO_NUMBERS = ("1:30", "1:30.5")
"""What YAML 1.1 reads as 90; by its patterns `010` is eight. Where a number is wanted both are refused."""


for _side in (_Loader, _ExplainingLoader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
        ),
        list("-+0123456789."),
    )

for _reader in (_Loader, _ExplainingLoader):
    # A date such as 2026-01-31 is text, for example an experiment's name.
    _reader.yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in known
            if tag not in _NOT_IN_JSON and not any(map(pattern.match, _NO_NUMBERS))
        ]
        for first, known in _reader.yaml_implicit_resolvers.items()
    }
    _reader.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
    )
    _reader.yaml_constructors = {
        tag: construct for tag, construct in _reader.yaml_constructors.items() if tag not in _NOT_IN_JSON
    }


def parse_scalar(text: str) -> Value:
    """The value that `text` has in YAML, as used by `key.path=value` overrides; raises yaml.YAMLError."""
    return _parse(text)[1]


def _parse(text: str) -> tuple[yaml.Node | None, Value]:
    """The nodes of `text` and its value; yaml.YAMLError also for what PyYAML reads and Python cannot hold."""
    try:
        return _parse_by(_Loader, text)
    except (yaml.YAMLError, UnicodeEncodeError):
        return _parse_by(_ExplainingLoader, text)


def _parse_by(kind: type[_Loader | _ExplainingLoader], text: str) -> tuple[yaml.Node | None, Value]:
    # Depth by the parser's events, which come one by one: the composer recurses, libyaml's without any check.
    depth = 0
    for event in yaml.parse(text, kind):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=cast(Any, event.start_mark))
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        _refuse_bomb(node)
        return node, loader.construct_document(node)
    except ValueError as error:  # an integer of thousands of digits
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()


def _refuse_bomb(root: yaml.Node) -> None:
    """Raise yaml.YAMLError for aliases that contain themselves, or that expand to too many values or levels."""
    seen: dict[int, tuple[int, int] | None] = {}

    def size(node: yaml.Node) -> tuple[int, int]:
        """Values of the node, and levels of lists and mappings."""
        if id(node) not in seen:
            seen[id(node)] = None  # being counted
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            below = [size(each) for part in parts for each in (part if isinstance(part, tuple) else (part,))]
            depth = isinstance(node, yaml.CollectionNode) + max((levels for _, levels in below), default=0)
            seen[id(node)] = 1 + sum(values for values, _ in below), depth
        known = seen[id(node)]
        if known is None:
            raise yaml.YAMLError("an alias that contains itself")
        return known

    values, depth = size(root)
    if values > _MAX_NODES:
        raise yaml.YAMLError(f"its aliases stand for more than {_MAX_NODES} values")
    if depth > MAX_DEPTH:
        raise yaml.YAMLError(f"its aliases stand for {depth} levels: {_TOO_DEEP}")


def dump_yaml(content: object) -> str:
    """Return `content` as YAML that `read_yaml` reads back unchanged, its keys in their order."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def flow_yaml(value: object) -> str:
    """`value` as YAML on one line: `{kind: constant}`, `[0.9, 0.95]`, `"a: b"`."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=inf)
    return text.removesuffix("\n").removesuffix("\n...")


def read_yaml(path: Path) -> tuple[dict[str, Value], dict[KeyPath, str]]:
    """The mapping in `path`, and the `file:line` of each key. ConfigError unless it is a UTF-8 YAML mapping, keys
    unique."""
    try:
        with path.open("rb") as file:  # may be a pipe of the shell
            content = file.read(_MAX_BYTES + 1)
        text = content.decode()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a YAML file") from None
    except (IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: has more than {_MAX_BYTES} bytes, the most that a YAML file may have")
    try:
        node, value = _parse(text)
    except yaml.MarkedYAMLError as error:
        where = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else str(path)
        problem = error.problem or str(error)
        advice = "; indent with spaces" if r"'\t'" in problem else ""
        raise ConfigError(f"{where}: not valid YAML ({problem}){advice}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(value, dict) or not isinstance(node, yaml.MappingNode):
        found = "nothing" if value is None else type(value).__name__
        raise ConfigError(f"{path}: must hold a mapping of keys to values, found {found}")
    origins: dict[KeyPath, str] = {}
    _record_lines(node, (), path, origins)
    return value, origins


def _record_lines(node: yaml.Node, prefix: KeyPath, path: Path, origins: dict[KeyPath, str]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*prefix, str(key.value))
            line = f"{path}:{key.start_mark.line + 1}"
            if here in origins:
                raise ConfigError(f"{line}: {'.'.join(here)} is given twice (first at {origins[here]}); keep one")
            origins[here] = line
            _record_lines(value, here, path, origins)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            origins[*prefix, str(index)] = f"{path}:{value.start_mark.line + 1}"
            _record_lines(value, (*prefix, str(index)), path, origins)


def child(value: Value, key: str) -> Value:
    """The value below a key (compared as text: `{1: 0.5}` has a number) or at an index; None where there is none."""
    if isinstance(value, dict):
        return next((below for name, below in value.items() if str(name) == key), None)
    if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
        return value[int(key)]
    return None


def place_of(path: KeyPath, origins: Mapping[KeyPath, str], otherwise: str) -> str:
    """The origin of the key at `path`, or of the nearest one above it that has one."""
    above = (path[:depth] for depth in range(len(path), 0, -1))
    return next((origins[each] for each in above if each in origins), otherwise)


def dotted(path: KeyPath, values: Value) -> str:
    """`path` as a user writes it: elements of lists in `values` by name, where they have one."""
    words = []
    for key in path:
        below = child(values, key)
        name = below.get("name") if isinstance(values, list) and isinstance(below, dict) else None
        words.append(name if isinstance(name, str) else key)
        values = below
    return ".".join(words)


def nearest(name: str, names: Iterable[str], question: str = "; did you mean {!r}?", cutoff: float = 0.6) -> str:
    """The question with the name that is closest to `name`; empty if none is close."""
    by_small = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), by_small, n=1, cutoff=cutoff)
    return question.format(by_small[close[0]]) if close else ""


def not_among(name: str, names: Iterable[str]) -> str:
    """The end of a refusal of `name`: what it may have meant, and all that there are."""
    names = list(names)
    hint = nearest(name, names, "; did you mean {!r}? there are ") or "; there are "
    return f"{name!r}{hint}{', '.join(names) or 'none'}"

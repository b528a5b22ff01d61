"""Why a stage has no finished result: how it differs from the most similar result of the same experiment."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from luffy.pipeline.chain.identity import IDENTITY_FILE, Identity, Json, read_identity

_SHOWN = 3
_HASH_DIGITS = 8


def why_not_reused(
    siblings: Iterable[Path], experiment: str, node: str, identity: Identity, inputs: Mapping[str, str]
) -> str:
    """One line: "first run", or what differs from the most similar result of `node` among `siblings`.

    Only results that `experiment` has made count: another one's settings explain nothing. Among equally similar ones
    the newest is taken. `inputs`: input name to the node that fills it.
    """
    candidates = []
    for directory in siblings:
        record = read_identity(directory)
        if record is not None and (record.experiment, record.node) == (experiment, node) and record.key != identity.key:
            found = list(differences(record.identity, identity, inputs))
            age = -(directory / IDENTITY_FILE).stat().st_mtime_ns
            candidates.append((len(found), age, record.key, found))
    if not candidates:
        return "first run"
    *_, nearest, found = min(candidates)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(found[:_SHOWN])}{more} (against {nearest})"


def differences(before: Identity, after: Identity, inputs: Mapping[str, str]) -> Iterator[str]:
    """Each difference in words, settings first; `inputs`: input name to the node that fills it."""
    old, new = dict(flatten(before.settings)), dict(flatten(after.settings))
    for path in [*new, *(path for path in old if path not in new)]:
        if old.get(path, "none") != new.get(path, "none"):
            yield f"{path} {_short(old.get(path, 'none'))} -> {_short(new.get(path, 'none'))}"
    for name in _changed(before.files, after.files):
        yield f"content of {name} {_hash(before.files.get(name))} -> {_hash(after.files.get(name))}"
    for name in _changed(before.upstream, after.upstream):
        old_key, new_key = before.upstream.get(name, "none"), after.upstream.get(name, "none")
        yield f"other result of {inputs.get(name, name)} ({old_key} -> {new_key})"
    modules = list(_changed(before.code, after.code))
    if modules:
        yield f"code changed ({', '.join(modules[:_SHOWN])}{', ...' if len(modules) > _SHOWN else ''})"


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    return (name for name in sorted({*before, *after}) if before.get(name) != after.get(name))


def flatten(value: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """The leaves with their dotted paths; an entry of a list of mappings goes by its name, else by its number."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from flatten(below, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list) and any(isinstance(below, dict) for below in value):
        for index, below in enumerate(value):
            label = below.get("name", index) if isinstance(below, dict) else index
            yield from flatten(below, f"{prefix}.{label}")
    else:
        yield prefix, value


def _hash(content: str | None) -> str:
    return "none" if content is None else content[:_HASH_DIGITS]


def _short(value: Json) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."

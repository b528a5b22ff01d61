"""`{kind: recipe, name: gsm8k}` becomes the source that the recipe describes, before anything is validated.

A recipe is a YAML file that holds one source: `data/recipes/` and `data/benchmarks/` by name, any other by `path`. With
`file` the same fields are read from a local copy instead of the hub.
"""

import difflib
from pathlib import Path

from luffy.config.shipped import recipe_file, recipe_names
from luffy.config.yaml_source import KeyPath, Value, read_yaml
from luffy.errors import ConfigError

_KEPT = ("author", "max_rows", "only")
"""Values of the experiment that override the recipe."""
RECIPE_KEYS = ("kind", "name", "path", "file", *_KEPT)
_HUB_ONLY = ("path", "name", "split", "revision")
Mapping = dict[str, Value]
Origins = dict[KeyPath, str]


def resolve_recipes(values: Mapping, origins: Origins, default_where: str) -> None:
    """Replace every recipe among the data sources in place, with the lines of its file.

    Raises ConfigError, naming the line, for an unknown key or recipe, or a `file` that does not fit.
    """
    for path in _source_paths(values):
        parent = _at(values, path[:-1])
        source = parent[path[-1]]
        if isinstance(source, dict) and source.get("kind") == "recipe":
            parent[path[-1]] = _resolved(source, path, origins, default_where)


def _source_paths(values: Mapping) -> list[KeyPath]:
    """Keys of `data` that hold a source: train, the parts of a mixture, corpus, every suite and benchmark."""
    paths: list[KeyPath] = [("data", key) for key in ("train", "corpus") if key in _at(values, ("data",))]
    parts = ("data", "train", "parts")
    paths += [(*parts, name, "source") for name in _at(values, parts) if "source" in _at(values, (*parts, name))]
    for parent in (("data", "suites"), ("data", "decontamination", "benchmarks")):
        paths += [(*parent, name) for name in _at(values, parent)]
    return paths


def _at(values: Mapping, path: KeyPath) -> Mapping:
    for key in path:
        below = values.get(key)
        values = below if isinstance(below, dict) else {}
    return values


def _resolved(asked: Mapping, path: KeyPath, origins: Origins, default_where: str) -> Mapping:
    where, field = origins.get(path, default_where), ".".join(path)
    unknown = sorted(set(asked) - set(RECIPE_KEYS))
    if unknown:
        raise ConfigError(
            f"{where}: {field}: unknown key {unknown[0]!r} of a recipe; allowed: {', '.join(RECIPE_KEYS)}"
        )
    recipe, lines = read_yaml(_file(asked, where, field))
    origins.update({(*path, *key): line for key, line in lines.items()})
    if "file" in asked:
        recipe = _from_file(recipe, asked["file"], f"{where}: {field}")
    return {**recipe, **{key: asked[key] for key in _KEPT if key in asked}}


def _file(asked: Mapping, where: str, field: str) -> Path:
    name, path = asked.get("name"), asked.get("path")
    if (name is None) == (path is None):
        raise ConfigError(
            f"{where}: {field}: a recipe needs exactly one of name (a shipped one) and path (a YAML file)"
        )
    if path is not None:
        file = Path(str(path))
        if not file.is_file():
            raise ConfigError(f"{where}: {field}.path: {path}: no such file; relative paths start at {Path.cwd()}")
        return file
    found = recipe_file(str(name))
    if found is None:
        close = difflib.get_close_matches(str(name), recipe_names(), n=3, cutoff=0.5)
        nearest = f"did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(f"{where}: {field}.name: no recipe {name!r}; {nearest}there are {', '.join(recipe_names())}")
    return found


def _from_file(recipe: Mapping, file: Value, where: str) -> Mapping:
    """The recipe read from a local copy of what it would take from the hub."""
    if recipe.get("kind") not in ("hub", "file"):
        raise ConfigError(f"{where}.file has no effect with a recipe of kind {recipe.get('kind')}; remove it")
    kept = {key: value for key, value in recipe.items() if key not in _HUB_ONLY}
    return {**kept, "kind": "file", "path": file}

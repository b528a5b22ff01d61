"""YAML from strangers: tags make no objects, aliases no bombs, a scalar is what is written; a mistake is one line."""

import re
from pathlib import Path

import pytest
from support.refusals import refused
from synthetic.settings import SMOKE

from luffy.config import load_experiment
from luffy.config.load import parse_overrides
from luffy.config.yaml_source import _ExplainingLoader, _Loader, _parse_by, parse_scalar, read_yaml
from luffy.errors import ConfigError

LAUGHS = "a0: &a0 [1, 1]\n" + "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
BY_ALIASES = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 300))
TOO_DEEP = "nested too deep, at most 100 levels are read"
NO_OBJECT = "could not determine a constructor"
HOSTILE = {
    "laughs": (LAUGHS, "stand for more than 200000 values"),
    "list in itself": ("a: &a [*a]", "an alias that contains itself"),
    "mapping in itself": ("a: &a {b: *a}", "an alias that contains itself"),
    "a level too deep": ("a: " + "[" * 100 + "]" * 100, TOO_DEEP),
    "deep": ("a: " + "[" * 5000, TOO_DEEP),
    "deep and closed": ("a: " + "[" * 5000 + "]" * 5000, TOO_DEEP),
    "deep enough for a segmentation fault": ("a: 1\nb: " + "[" * 50_000, f"own.yaml:2: not valid YAML ({TOO_DEEP})"),
    "deep mappings": ("a: " + "{a: " * 50_000, TOO_DEEP),
    "deep in a block": ("a:\n  " + "- " * 50_000 + "1", TOO_DEEP),
    "deep keys": ("a:\n  " + "? " * 50_000 + "1", TOO_DEEP),
    "deep by aliases": (BY_ALIASES, "aliases stand for 301 levels"),
    "apply": ("a: !!python/object/apply:os.system [touch owned]", NO_OBJECT),
    "name": ("a: !!python/name:os.system", NO_OBJECT),
    "new": ("a: !!python/object/new:type [a]", NO_OBJECT),
    "date": ("a: !!timestamp 2024-01-01", NO_OBJECT),
    "binary": ("a: !!binary aGVsbG8=", NO_OBJECT),
    "set": ("a: !!set {b, c}", NO_OBJECT),
    "integer": ("a: " + "9" * 5000, "Exceeds the limit"),
}


@pytest.mark.parametrize(("text", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_one_line_and_makes_nothing(tmp_path, monkeypatch, text, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(text)
    with refused("own.yaml", reason, error=ConfigError):
        read_yaml(tmp_path / "own.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml"]


DEEP = {
    "list": ("rl.steps=" + "[" * 50_000, f"rl.steps: '{'[' * 60}...' is not valid YAML ({TOO_DEEP})"),
    "block": ("rl.steps=" + "- " * 50_000, TOO_DEEP),
    "key": (".".join("a" * 50_000) + "=1", "a key of 50000 parts; at most 100 are read"),
}


@pytest.mark.parametrize(("override", "reason"), DEEP.values(), ids=DEEP)
def test_a_deep_override_is_one_short_line(override, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        parse_overrides([override], "command line")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_file_without_an_end_is_one_line():
    with refused("/dev/zero: has more than 16777216 bytes", error=ConfigError):
        read_yaml(Path("/dev/zero"))


def test_honest_aliases_are_read_dates_are_text_and_keys_names_of_whatever_spelling(tmp_path):
    text = "a: &a {x: [1, 2]}\nb: *a\nc: {<<: *a, y: 3}\nd: 2024-01-01 10:00:00\ne: {on: validation, off: true}\n"
    assert parse_scalar("[" * 100 + "]" * 100) is not None
    (tmp_path / "own.yaml").write_text(text)
    values, origins = read_yaml(tmp_path / "own.yaml")
    a, d = {"x": [1, 2]}, "2024-01-01 10:00:00"
    assert values == {"a": a, "b": a, "c": {**a, "y": 3}, "d": d, "e": {"on": "validation", "off": True}}
    assert origins["e", "on"] == f"{tmp_path / 'own.yaml'}:5"


@pytest.mark.parametrize("file", sorted(SMOKE.parent.rglob("*.yaml")), ids=lambda file: file.stem)
def test_both_parsers_read_the_same_values_and_lines(file):
    fast, explaining = (_parse_by(kind, file.read_text()) for kind in (_Loader, _ExplainingLoader))
    assert fast[1] == explaining[1]
    assert [key.start_mark.line for key, _ in fast[0].value] == [key.start_mark.line for key, _ in explaining[0].value]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10), ("-3", -3), ("1_000", 1000), ("0x1F", 31), ("1e-5", 1e-5), ("1.5", 1.5), (".inf", float("inf")),
        ("", None), *((text, text) for text in ("010", "1:30", "1:30.5", "0b11", "2026-01-31", "2024-99-99")),
    ],
)  # fmt: skip
def test_a_scalar_is_what_is_written(text, value):
    assert parse_scalar(text) == value


# What YAML 1.1 reads as another number than is written, and what no file or counter holds.
IMPOSSIBLE = {
    "rl.steps=010": ["rl.steps", "'010'"],
    "seed=1:30": ["seed", "'1:30'"],
    f"rl.steps={10**26}": ["rl", "steps", "1e+26"],
    f"name={'a' * 300}": ["name", "100"],
    'name="\\ud800"': ["name", "surrogate"],
    "name=\udc80": ["name"],
}


@pytest.mark.parametrize(("override", "named"), IMPOSSIBLE.items(), ids=map(ascii, IMPOSSIBLE))
def test_what_no_run_can_have_is_refused(override, named):
    with refused(*named, error=ConfigError):
        load_experiment(SMOKE, [override])

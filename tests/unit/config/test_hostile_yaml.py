"""YAML from strangers: tags make no objects, aliases no bombs; each is one line that names the file."""

from pathlib import Path

import pytest

from luffy.config.load import parse_overrides
from luffy.config.yaml_source import _ExplainingLoader, _Loader, _parse_by, parse_scalar, read_yaml
from luffy.errors import ConfigError

EXPERIMENTS = Path(__file__).parents[3] / "exp_configs"
LAUGHS = "a0: &a0 [1, 1]\n" + "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))


HOSTILE = {
    "laughs": (LAUGHS, "stand for more than 200000 values"),
    "list in itself": ("a: &a [*a]", "an alias that contains itself"),
    "mapping in itself": ("a: &a {b: *a}", "an alias that contains itself"),
    "deep": ("a: " + "[" * 5000, "nested too deep"),
    "deep and closed": ("a: " + "[" * 5000 + "]" * 5000, "nested too deep"),
    "deep enough for a segmentation fault": (
        "a: 1\nb: " + "[" * 50_000,
        r"own\.yaml:2: .*nested too deep, at most 100 levels are read",
    ),
    "deep mappings": ("a: " + "{a: " * 50_000, "nested too deep"),
    "deep in a block": ("a:\n  " + "- " * 50_000 + "1", "nested too deep"),
    "deep keys": ("a:\n  " + "? " * 50_000 + "1", "nested too deep"),
    "deep by aliases": (
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 300)),
        "aliases stand for 301 levels",
    ),
    "apply": ("a: !!python/object/apply:os.system [touch owned]", "could not determine a constructor"),
    "name": ("a: !!python/name:os.system", "could not determine a constructor"),
    "new": ("a: !!python/object/new:type [a]", "could not determine a constructor"),
    "date": ("a: !!timestamp 2024-01-01", "could not determine a constructor"),
    "binary": ("a: !!binary aGVsbG8=", "could not determine a constructor"),
    "set": ("a: !!set {b, c}", "could not determine a constructor"),
    "integer": ("a: " + "9" * 5000, "Exceeds the limit"),
}


@pytest.mark.parametrize(("text", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_one_line_and_makes_nothing(tmp_path, monkeypatch, text, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_yaml(tmp_path / "own.yaml")
    assert "own.yaml" in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml"]


DEEP = {
    "list": (
        "rl.steps=" + "[" * 50_000,
        r"rl\.steps: '\[+\.\.\.' is not valid YAML \(nested too deep, at most 100 levels",
    ),
    "block": ("rl.steps=" + "- " * 50_000, "nested too deep"),
    "key": (".".join("a" * 50_000) + "=1", "a key of 50000 parts; at most 100 are read"),
}


@pytest.mark.parametrize(("override", "reason"), DEEP.values(), ids=DEEP)
def test_a_deep_override_is_one_short_line(override, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_overrides([override], "command line")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_file_without_an_end_is_one_line():
    with pytest.raises(ConfigError, match="/dev/zero: has more than 16777216 bytes"):
        read_yaml(Path("/dev/zero"))


@pytest.mark.parametrize("text", ["2024-01-01", "2024-99-99", "2024-01-01 10:00:00"])
def test_a_date_is_text(tmp_path, text):
    (tmp_path / "own.yaml").write_text(f"a: {text}\n")
    assert read_yaml(tmp_path / "own.yaml")[0] == {"a": text} and parse_scalar(text) == text


def test_honest_aliases_are_read(tmp_path):
    (tmp_path / "own.yaml").write_text("a: &a {x: [1, 2]}\nb: *a\nc: {<<: *a, y: 3}\n")
    assert read_yaml(tmp_path / "own.yaml")[0] == {"a": {"x": [1, 2]}, "b": {"x": [1, 2]}, "c": {"x": [1, 2], "y": 3}}
    assert parse_scalar("") is None and parse_scalar("1e-4") == 1e-4


@pytest.mark.parametrize("file", sorted(EXPERIMENTS.rglob("*.yaml")), ids=lambda file: file.stem)
def test_both_parsers_read_the_same_values_and_lines(file):
    fast, explaining = (_parse_by(kind, file.read_text()) for kind in (_Loader, _ExplainingLoader))
    assert fast[1] == explaining[1]
    assert [key.start_mark.line for key, _ in fast[0].value] == [key.start_mark.line for key, _ in explaining[0].value]

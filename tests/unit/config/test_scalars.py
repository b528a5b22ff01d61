"""Scalars that YAML 1.1 reads as other numbers than are written, and values that no file or counter holds."""

import pytest
from support.refusals import refused
from support.stages import CONFIGS

from luffy.config import load_experiment
from luffy.config.yaml_source import parse_scalar
from luffy.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10), ("-3", -3), ("1_000", 1000), ("0x1F", 31), ("1e-5", 1e-5), ("1.5", 1.5), (".inf", float("inf")),
        ("010", "010"), ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("0b11", "0b11"), ("2026-01-31", "2026-01-31"),
    ],
)  # fmt: skip
def test_a_number_is_what_is_written(text, value):
    assert parse_scalar(text) == value


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("rl.steps=010", ("rl.steps", "'010'")),
        ("seed=1:30", ("seed", "'1:30'")),
        (f"rl.steps={10**26}", ("rl", "steps", "1e+26")),
        (f"name={'a' * 300}", ("name", "100")),
        ('name="\\ud800"', ("name", "surrogate")),
        ("name=\udc80", ("name",)),
    ],
)
def test_what_no_run_can_have_is_refused(override, named):
    with refused(*named, error=ConfigError):
        load_experiment(CONFIGS / "smoke.yaml", [override])

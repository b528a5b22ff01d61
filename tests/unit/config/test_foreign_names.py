"""Who writes a name of another system is told the one that it has here."""

import re
from pathlib import Path

import pytest
from support.refusals import refused
from support.stages import CONFIGS

from luffy.config import available_presets, load_experiment
from luffy.config.experiment import ExperimentConfig
from luffy.config.fields import models_at
from luffy.config.foreign_names import METHOD_OF, SETTING_OF
from luffy.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs/coming_from.md").read_text()


@pytest.mark.parametrize(("name", "here"), SETTING_OF.items())
def test_a_setting_of_another_system_is_named_as_here(name, here):
    for place in ("rl", "objective", "data"):
        if not any(name in model.model_fields for model in models_at((place,), ExperimentConfig)):
            with refused(f"{place}.{name}", here, error=ConfigError):
                load_experiment(CONFIGS / "smoke.yaml", [f"{place}.{name}=1"])
    for path in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", here):
        *above, last = path.replace(".on_policy", ".x").split(".")
        assert any(last in model.model_fields for model in models_at(tuple(above), ExperimentConfig)), path
    row = next(line for line in PAGE.splitlines() if line.endswith(f"| {here} |"))
    assert f"`{name}`" in row


@pytest.mark.parametrize(("name", "here"), METHOD_OF.items())
def test_a_method_of_another_system_is_named_as_here(name, here):
    assert here in available_presets("methods") and f"| `method={name}` | `method={here}` |" in PAGE
    with refused(repr(name), repr(here), error=ConfigError):
        load_experiment(CONFIGS / "smoke.yaml", [f"method={name}"])

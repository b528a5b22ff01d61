"""What can be exported as a task set of verifiers."""

import pytest

from luffy.config.environment import MixtureEnvironment
from luffy.environments.exported.export_folder import check_exportable
from luffy.errors import ConfigError


def test_a_mixture_with_an_environment_of_verifiers_is_refused() -> None:
    wordle = {"kind": "verifiers", "environment": "wordle", "python": "python"}
    parts = {
        "game": {"environment": {"kind": "guess_number"}, "plays": ("guess_number",)},
        "words": {"environment": wordle, "plays": ("verifiers/wordle",)},
    }
    with pytest.raises(ConfigError, match="wordle is one of verifiers already"):
        check_exportable(MixtureEnvironment.model_validate({"kind": "mixture", "parts": parts}))

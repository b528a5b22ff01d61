"""From the name of an environment to the experiment of `luffy eval`."""

from pathlib import Path

import pytest

from luffy.config.environment import (
    FiveLettersEnvironment,
    GuessNumberEnvironment,
    ToolsEnvironment,
    VerifiersEnvironment,
)
from luffy.config.environment_look import EnvironmentLook, look_config
from luffy.errors import ConfigError

URL = ("http://127.0.0.1:1/v1",)


def looked(target: str, **settings: object) -> EnvironmentLook:
    return EnvironmentLook(target, "api:gpt-x", 20, urls=URL, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("guess_number", GuessNumberEnvironment),
        ("five_letters", FiveLettersEnvironment),
        ("calculator", ToolsEnvironment),
        ("python", ToolsEnvironment),
    ],
)
def test_built_in_environments_bring_their_problems(target: str, kind: type) -> None:
    config = look_config(looked(target))
    assert isinstance(config.environment, kind)
    assert {source.num_prompts for source in config.data.suites.values()} == {20}
    assert config.evaluation is not None and config.evaluation.engine == "openai"


def test_an_environment_of_verifiers_by_its_id() -> None:
    config = look_config(looked("wordle", python="/opt/python", arguments={"max_turns": 3}))
    assert isinstance(config.environment, VerifiersEnvironment)
    (source,) = config.data.suites.values()
    assert config.environment.is_same_as(source)
    assert (config.environment.arguments, source.split) == ({"max_turns": 3}, "eval")


def test_a_file_gives_environment_suites_and_grading_and_the_rest_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "environment:\n  kind: guess_number\n  limits: {max_turns: 2}\n"
        "  scoring: {group_measures: {rank: 'synthetic.episode_measures:rank'}, weights: {rank: 1.0}}\n"
        "grading: {kind: exact}\nrl: {steps: 3}\n"
    )
    config = look_config(looked(str(file)))
    assert config.environment is not None and config.environment.limits.max_turns == 2
    assert config.environment.scoring.is_answer_alone
    assert config.grading.kind.kind == "exact"
    assert config.rl is None


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        (
            "wordle",
            {},
            "neither a YAML file nor one of guess_number, five_letters, calculator, python; .* --python has to name",
        ),
        ("guess_number", {"python": "/opt/python"}, "--python has no effect"),
        ("calculator", {"arguments": {"a": 1}}, "--argument has no effect"),
        ("empty.yaml", {}, "has no section environment"),
        ("tools.yaml", {}, "names no problems; add data.suites"),
    ],
)
def test_what_is_missing_or_idle_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, settings: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("seed: 3\n")
    (tmp_path / "tools.yaml").write_text("environment: {kind: tools, tools: [calculator]}\n")
    with pytest.raises(ConfigError, match=message):
        look_config(looked(target, **settings))
